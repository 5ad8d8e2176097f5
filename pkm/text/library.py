"""Text to ids and back with a Hugging Face `tokenizer.json`: what the `tokenizers` library makes of a text, and an end."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pkm.errors import UserError
from pkm.files import explained
from pkm.text.bounded_cache import BoundedCache
from pkm.text.library_chunks import CUT, cuts_before_spaces

INSTALL = "pip install 'pkm[tokenizers]'"
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]")
"""Names under which tokenizers have a token that ends a document, the first that is there."""

MOST_IDS = 1 << 24
CHUNKS = 1 << 20
"""Words with the space before them whose ids are remembered: at most about 200 MB."""
NAMED = 20
"""Tokens that a message names."""


class LibraryEncoder:
    """Documents -> ids: the library's own of the whole text, without what its post-processor adds, then the end's id.

    A text that holds the name of a special token (`<|endoftext|>`) holds these characters, not the token, but where the model
    itself has a piece of them (Unigram). What the file says of truncation and padding is left out. Words are what stands
    between white space.

    size         ids go from 0 to size - 1
    end_id       ends every document
    unknown_id   what the tokenizer knows nothing of; None if it can say everything, or leaves it out
    """

    def __init__(self, content: bytes, end: str | None = None, where: str = "tokenizer.json"):
        """content: the file's; end: name of the token that ends a document (None: the first of ENDS that is there).

        UserError where the library is not installed or does not read the file, where the token is not there, and where
        encoding is random (`dropout`).
        """
        self._tokenizer = _loaded(content, where)
        self.vocab = None  # its pieces are the library's to know
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        if not ids:
            raise UserError("its vocabulary is empty", where, "give a tokenizer that was trained")
        self.size = max(ids.values()) + 1
        if self.size > MOST_IDS:
            raise UserError(
                f"it has the id {self.size - 1}, more than a model has tokens", where, "number them from 0 on"
            )
        self.end = _end(end, ids, [added[i].content for i in sorted(special)], where)
        self.end_id = ids[self.end]
        self.unknown_id = _unknown(content, ids)
        self.unsampled = sorted(set(range(self.size)) - set(ids.values()) | special - {self.end_id})
        """Ids that generation never gives: special ones but for the end, and numbers without a token."""
        self._chunks = BoundedCache(self._chunk_ids, CHUNKS) if cuts_before_spaces(content) else None

    @classmethod
    def load(cls, path: str | Path, end: str | None = None) -> LibraryEncoder:
        """Of a file. UserError as above, and where it cannot be read."""
        with explained(path):
            content = Path(path).read_bytes()
        return cls(content, end, str(path))

    def encode_batch(self, texts: Sequence[str]) -> list[tuple[Sequence[int], int]]:
        """(ids, words) of every document. UserError where the tokenizer has no ids for one."""
        if self._chunks is not None:
            each = (b"".join(map(self._chunks.__getitem__, CUT.split(text))) for text in texts)
            found = [np.frombuffer(data, np.uint32).tolist() for data in each]
        else:
            found = self._library_ids(texts)
        for ids in found:
            ids.append(self.end_id)
        return [(ids, len(text.split())) for ids, text in zip(found, texts, strict=True)]

    def _chunk_ids(self, chunk: str) -> bytes:
        [ids] = self._library_ids([chunk])
        return np.array(ids, np.uint32).tobytes()

    def _library_ids(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            # Without offsets in characters, which nobody reads.
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            fix = "give a tokenizer with a token for what it does not know, or a byte-level one"
            raise UserError(f"the tokenizer has no ids for a text: {error}", "subwords.tokenizer", fix) from error
        return [one.ids for one in encoded]

    def encode(self, text: str, out: array[int]) -> int:
        """Append the ids of a document to `out`; returns its words."""
        [(ids, words)] = self.encode_batch([text])
        out.extend(ids)
        return words

    def decode(self, ids: Iterable[int]) -> str:
        """The library's text of every document, a newline between two; other special tokens are left out."""
        documents: list[list[int]] = [[]]
        for i in ids:
            if i == self.end_id:
                documents.append([])
            else:
                documents[-1].append(i)
        if len(documents) > 1 and not documents[-1]:
            documents.pop()
        return "\n".join(self._tokenizer.decode(document, skip_special_tokens=True) for document in documents)

    def added_texts(self, runs: Sequence[Sequence[int]]) -> list[str]:
        """What each of these runs of ids adds to a text that goes on, white space included; U+FFFD for part of a character."""
        # A decoder may leave out a space where the text begins, and one at its end if marks stand at the ends of words.
        before, text = self._plain_token
        after = [before] if self._end_of_word else []
        whole = self._tokenizer.decode_batch([[before, *run, *after] for run in runs], skip_special_tokens=True)
        return [one[len(text) : len(one) - len(text) * len(after)] for one in whole]

    @cached_property
    def _end_of_word(self) -> str:
        return getattr(self._tokenizer.model, "end_of_word_suffix", None) or ""

    @cached_property
    def _plain_token(self) -> tuple[int, str]:
        """A token of letters, which does not end a word where that is marked; and its text."""
        for i in sorted(set(range(self.size)) - set(self.unsampled)):
            name, text = self._tokenizer.id_to_token(i), self._tokenizer.decode([i])
            if text.isalpha() and not (self._end_of_word and name.endswith(self._end_of_word)):
                return i, text
        raise UserError(
            "it has no token of letters alone", "tokenizer.json", "give a tokenizer that was trained on text"
        )

    def prompt(self, text: str) -> list[int]:
        """What a model sees before it goes on from a text that begins a document."""
        [(ids, _)] = self.encode_batch([text])
        return [self.end_id, *ids[:-1]]


def learn_byte_level(texts: Iterator[str], vocab_size: int, specials: Sequence[str], min_count: int) -> str:
    """A tokenizer.json: BPE of bytes within the chunks that GPT-2 cuts text into (Radford et al., 2019), learned from texts.

    The tokens are the specials, with ids from 0 on, the 256 bytes, and merges of what is seen at least `min_count` times,
    until there are `vocab_size`. The result does not depend on the order of the texts, nor on threads.
    """
    require_library()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_count,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True)


def require_library() -> None:
    """UserError where `tokenizers` is not installed."""
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise UserError("the package tokenizers is not installed", "subwords", INSTALL) from error


def _loaded(content: bytes, where: str) -> Any:
    require_library()
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises nothing narrower
        what = f"it is no tokenizer.json that the library reads: {str(error)[:200]}"
        raise UserError(what, where, "give the file of that name that tokenizers or transformers save") from error
    if getattr(tokenizer.model, "dropout", None):
        what = (
            f"it leaves out {tokenizer.model.dropout:g} of its merges at random: a text would have other ids each time"
        )
        raise UserError(what, where, "set model.dropout to null in it")
    return tokenizer


def _end(asked: str | None, ids: dict[str, int], special: list[str], where: str) -> str:
    known = f"its special tokens are {', '.join(special[:NAMED])}" if special else "it has no special tokens"
    if asked is not None:
        if asked not in ids:
            raise UserError(f"{where} has no token {asked!r}", "subwords.end", f"name one that it has: {known}")
        return asked
    for name in ENDS:
        if name in ids:
            return name
    what = f"{where} has no token by which the end of a document is known ({', '.join(ENDS)})"
    raise UserError(what, "subwords.end", f"name the one to put after every document: {known}")


def _unknown(content: bytes, ids: dict[str, int]) -> int | None:
    """The id of the model's unknown token: by name (BPE, WordPiece, WordLevel) or by number (Unigram)."""
    model = json.loads(content)["model"]
    if isinstance(number := model.get("unk_id"), int):
        return number
    # Byte fallback spells what is not in the vocabulary.
    return None if model.get("byte_fallback") else ids.get(model.get("unk_token") or "")
