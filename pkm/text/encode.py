"""Raw text to ids and back: normalise, tokenize as Moses, split as fastBPE, look up."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Literal

from pkm.text.bpe import Codes
from pkm.text.detokenize import detokenize
from pkm.text.moses_rules import tokenize_line
from pkm.text.normalize import normalize_xlm
from pkm.text.vocab import CONTINUES, EOS_ID, UNK_ID, Vocab


class Encoder:
    """Documents -> ids: every line's pieces, then `</s>`; blank lines are skipped."""

    def __init__(
        self,
        codes: Codes,
        vocab: Vocab,
        *,
        escape: bool = False,
        normalize: Literal["xlm"] | None = None,
        cache_megabytes: int = 256,
    ):
        self.codes, self.vocab, self.escape, self.normalize = codes, vocab, escape, normalize
        self.cache_megabytes = cache_megabytes
        self._words: dict[str, list[int]] = {}

    def encode(self, text: str, out: array[int]) -> int:
        """Append the ids of a document to `out`; returns its number of Moses words."""
        if self.normalize == "xlm":
            text = normalize_xlm(text)
        words = 0
        for line in text.split("\n"):
            tokens = [token for token in tokenize_line(line, self.escape).split(" ") if token.strip()]
            if tokens:
                words += len(tokens)
                for token in tokens:
                    out.extend(self._word_ids(token))
                out.append(EOS_ID)
        return words

    def _word_ids(self, word: str) -> list[int]:
        ids = self._words.get(word)
        if ids is None:
            ids = self._words[word] = [self.vocab.id(piece) for piece in self.codes.pieces(word, self.vocab)]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Readable text: pieces joined, tokens detokenized, a newline for every `</s>`."""
        lines: list[str] = []
        line: list[str] = []
        for i in ids:
            if i == EOS_ID:
                lines.append(self._readable(line))
                line = []
            elif i >= self.vocab.first or i == UNK_ID:
                line.append(self.vocab.pieces[i])
        return "\n".join([*lines, self._readable(line)])

    def _readable(self, pieces: list[str]) -> str:
        tokens = " ".join(pieces).replace(CONTINUES + " ", "").removesuffix(CONTINUES)
        return detokenize(tokens)
