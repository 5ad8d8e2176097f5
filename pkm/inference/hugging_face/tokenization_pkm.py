"""Moses tokens in byte-pair pieces, as the model was trained on, for transformers: it needs that package alone.

    AutoTokenizer.from_pretrained(DIRECTORY, trust_remote_code=True)

The files beside it (`chunks`, `moses_rules`, `normalize`, `detokenize`, `perl_classes`) are the training framework's own, so
that ids are the same. A text begins with `</s>`, as every text did in training; each of its line breaks is a `</s>` too.
"""

from __future__ import annotations

import json
import os
import shutil
from itertools import pairwise
from typing import Any

from transformers import AddedToken, PreTrainedTokenizer

from pkm.text.chunks import NEWLINE, document_keys, key_tokens
from pkm.text.detokenize import detokenize
from pkm.text.normalize import normalize_xlm

BEGIN, PAD, UNKNOWN = "</s>", "<pad>", "<unk>"
UNIVERSAL = ("<s>", "</s>", "<pad>", "<unk>")
END, CONTINUES = "</w>", "@@"
FILES = {"vocab_file": "vocab", "codes_file": "codes", "settings_file": "moses.json"}


class PkmTokenizer(PreTrainedTokenizer):
    """Text to ids and back.

    vocab_file       `piece count` lines, from the id after the special ones on
    codes_file       `left right count` lines: merges, in their order
    settings_file    {"specials": names of ids from 4 on, "encoder": {"escape", "normalize"}}
    """

    vocab_files_names = FILES
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file: str, codes_file: str, settings_file: str, **kwargs: Any):
        self._sources = {"vocab_file": vocab_file, "codes_file": codes_file, "settings_file": settings_file}
        with open(settings_file, encoding="utf-8") as file:
            settings = json.load(file)
        self._escape, self._normalize = settings["encoder"]["escape"], settings["encoder"]["normalize"]
        pieces = [line.rpartition(" ")[0] for line in _lines(vocab_file)]
        self._pieces = [*UNIVERSAL, *settings["specials"], *pieces]
        self._first = len(UNIVERSAL) + len(settings["specials"])
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}
        merges = [tuple(line.split(" ")[:2]) for line in _lines(codes_file)]
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._parts = {left + right: (left, right) for left, right in merges}
        self._known: dict[str, list[str]] = {}
        for name, token in (("bos_token", BEGIN), ("eos_token", BEGIN), ("pad_token", PAD), ("unk_token", UNKNOWN)):
            kwargs[name] = AddedToken(token, special=True, normalized=False)
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def get_vocab(self) -> dict[str, int]:
        return {**self._ids, **self.added_tokens_encoder}

    def tokenize(
        self, text: str, pair: str | None = None, add_special_tokens: bool = False, **kwargs: Any
    ) -> list[str]:
        """Pieces of a text, `</s>` where a line ends; the last line goes on unless the text ends in a line break.

        A text that holds the name of a special piece holds these characters, not the piece.
        """
        if self._normalize == "xlm":
            text = normalize_xlm(text)
        found: list[str] = []
        for key in document_keys(text):
            if key == NEWLINE:
                found.append(BEGIN)
            else:
                for word in filter(None, key_tokens(key, self._escape).split(" ")):
                    found += self._pieces_of(word)
        return found if text.endswith(NEWLINE) else found[:-1]

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self.tokenize(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, self._ids[UNKNOWN])

    def _convert_id_to_token(self, index: int) -> str:
        return self._pieces[index]

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        begin = [self._ids[BEGIN]]
        return begin + token_ids_0 + (begin + token_ids_1 if token_ids_1 is not None else [])

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        lines: list[list[str]] = [[]]
        for token in tokens:
            if token == BEGIN:
                lines.append([])
            elif token == UNKNOWN or self._ids.get(token, 0) >= self._first:
                lines[-1].append(token)
        if len(lines) > 1 and not lines[0]:
            del lines[0]  # the text's beginning
        joined = (" ".join(line).replace(CONTINUES + " ", "").removesuffix(CONTINUES) for line in lines)
        return NEWLINE.join(map(detokenize, joined))

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: Any = None,
        **kwargs: Any,
    ) -> str:
        """Readable text. `skip_special_tokens` changes nothing: line breaks are tokens, and others are never text."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.convert_tokens_to_string([self._pieces[i] for i in ids if i < len(self._pieces)])

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        saved = []
        for name, source in self._sources.items():
            target = os.path.join(save_directory, (f"{filename_prefix}-" if filename_prefix else "") + FILES[name])
            if os.path.abspath(source) != os.path.abspath(target):
                shutil.copyfile(source, target)
            saved.append(target)
        return tuple(saved)

    def _pieces_of(self, word: str) -> list[str]:
        """A word's pieces by the merges; what the vocabulary does not hold is taken apart again."""
        if word not in self._known:
            if len(self._known) > 1_000_000:
                self._known.clear()
            symbols, kept = self._merged([*word[:-1], word[-1] + END]), list[str]()
            for i, symbol in enumerate(symbols):
                self._split_until_known(symbol, i == len(symbols) - 1, kept)
            self._known[word] = [
                s.removesuffix(END) if i == len(kept) - 1 else s + CONTINUES for i, s in enumerate(kept)
            ]
        return self._known[word]

    def _merged(self, symbols: list[str]) -> list[str]:
        none = len(self._ranks)
        while len(symbols) > 1:
            ranks = [self._ranks.get(pair, none) for pair in pairwise(symbols)]
            best = min(ranks)
            if best == none:
                break
            merged, i = list[str](), 0
            while i < len(symbols):
                pair = i + 1 < len(symbols) and self._ranks.get((symbols[i], symbols[i + 1])) == best
                merged.append(symbols[i] + symbols[i + 1] if pair else symbols[i])
                i += 2 if pair else 1
            symbols = merged
        return symbols

    def _split_until_known(self, symbol: str, final: bool, kept: list[str]) -> None:
        left_to_do = [(symbol, final)]
        while left_to_do:
            symbol, final = left_to_do.pop()
            printed = symbol[: -len(END)] if final else symbol + CONTINUES
            if self._ids.get(printed, -1) >= self._first or symbol not in self._parts:
                kept.append(symbol)
            else:
                left, right = self._parts[symbol]
                left_to_do += ((right, final), (left, False))


def _lines(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        return [line.removesuffix("\r") for line in file.read().removesuffix("\n").split("\n")]
