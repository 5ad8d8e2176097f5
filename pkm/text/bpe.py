"""Byte-pair encoding as fastBPE does it: codes, their application to words, and the file formats.

A word is split into characters, the last of which carries `</w>`; then the pairs of the codes are merged, the
lowest-ranked first. Printed pieces end in `@@` where the word goes on.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from pkm.errors import UserError
from pkm.text.merges import Merges
from pkm.text.vocab import CONTINUES, read_lines

logger = logging.getLogger(__name__)

END = "</w>"

# A character is a byte that starts one and the continuation bytes after it, however broken the text is: undecodable
# bytes come as surrogates. From a NUL on, fastBPE takes the rest of the word as one character.
_CHARACTERS = re.compile(
    "[^\0\udc80-\udcbf][\udc80-\udcbf]*(?:\0.*)?|[\0\udc80-\udcbf].*?(?=[^\udc80-\udcbf]|\\Z)", re.DOTALL
)


class Codes:
    """Merges in their order, with the counts they were learned at.

    merges  (left, right) pairs; `</w>` closes a piece that ends a word
    counts  occurrences of the pair when it was merged
    """

    def __init__(self, merges: list[tuple[str, str]], counts: list[int]):
        assert len(merges) == len(counts)
        self.merges = merges
        self.counts = counts
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._parts = {left + right: (left, right) for left, right in merges}

    def __len__(self) -> int:
        return len(self.merges)

    @classmethod
    def load(cls, path: str | Path) -> Codes:
        """Read `left right count` lines. Raises UserError naming file:line for anything else."""
        merges, counts = [], []
        made: set[str] = set()
        for number, line in enumerate(read_lines(path), 1):
            fields = [field for field in line.split(" ") if field]
            where = f"{path}:{number}"
            if len(fields) != 3 or not fields[2].isascii() or not fields[2].isdecimal():
                raise UserError(
                    f"expected `left right count`, found {line!r}"[:200],
                    where=where,
                    fix="give codes as fastBPE's learnbpe or `python -m pkm.text.bpe learn` writes them"
                    " (files of subword-nmt have a version line and no counts)",
                )
            if fields[0] + fields[1] in made:
                raise UserError(
                    f"the piece {fields[0] + fields[1]!r} is made twice", where=where, fix="remove the line"
                )
            made.add(fields[0] + fields[1])
            merges.append((fields[0], fields[1]))
            counts.append(int(fields[2]))
        if not merges:
            raise UserError("the codes are empty", where=str(path), fix="name a file of `left right count` lines")
        return cls(merges, counts)

    def save(self, path: str | Path) -> None:
        """Write the codes in fastBPE's format."""
        with open(path, "wb") as file:
            file.write(self.to_bytes())

    def to_bytes(self) -> bytes:
        """The codes file's content."""
        lines = (f"{left} {right} {count}\n" for (left, right), count in zip(self.merges, self.counts, strict=True))
        return "".join(lines).encode("utf-8", "surrogateescape")

    def pieces(self, word: str, vocab: Container[str] | None = None) -> list[str]:
        """A word's pieces as printed: all but the last end in `@@`.

        With a vocabulary, pieces outside it are split back into what they were merged from, down to characters.
        """
        symbols = self._merge(characters(word))
        if vocab is not None:
            symbols = self._limit(symbols, vocab)
        printed = [symbol + CONTINUES for symbol in symbols]
        printed[-1] = symbols[-1][: -len(END)]
        return printed

    def _merge(self, symbols: list[str]) -> list[str]:
        ranks = self._ranks
        worst = len(ranks)
        while len(symbols) > 1:
            best, pair = worst, None
            for candidate in pairwise(symbols):
                rank = ranks.get(candidate, worst)
                if rank < best:
                    best, pair = rank, candidate
            if pair is None:
                break
            symbols = _join(symbols, *pair)
        return symbols

    def _limit(self, symbols: list[str], vocab: Container[str]) -> list[str]:
        kept: list[str] = []
        last = len(symbols) - 1
        for i, symbol in enumerate(symbols):
            self._split_until_known(symbol, i == last, vocab, kept)
        return kept

    def _split_until_known(self, symbol: str, final: bool, vocab: Container[str], kept: list[str]) -> None:
        printed = symbol[: -len(END)] if final else symbol + CONTINUES
        if printed in vocab or symbol not in self._parts:
            kept.append(symbol)
            return
        left, right = self._parts[symbol]
        self._split_until_known(left, False, vocab, kept)
        self._split_until_known(right, final, vocab, kept)


def characters(word: str) -> list[str]:
    """A word's characters, the last one followed by `</w>`."""
    symbols = list(word) if word.isprintable() else _CHARACTERS.findall(word)
    symbols[-1] += END
    return symbols


def learn(words: Mapping[str, int], merges: int) -> Codes:
    """Learn up to `merges` merges from the counts of tokenized words.

    Stops, with a warning, where no pair is left to merge. Of equally frequent pairs the one whose symbols came first
    is merged first (see Merges).
    """
    learner = Merges(words, characters)
    found: list[tuple[str, str, int]] = []
    while len(found) < merges and (step := learner.next()) is not None:
        found.append(step)
    if len(found) < merges:
        logger.warning("only %d of %d merges: the text holds no more pairs", len(found), merges)
    return Codes([(left, right) for left, right, _ in found], [count for _, _, count in found])


def apply(codes: Codes, text: str, vocab: Container[str] | None = None) -> str:
    """Tokenized text -> the same text with every word in pieces; spaces and newlines stay where they are."""
    return Applier(codes, vocab).apply(text)


def count_pieces(codes: Codes, words: Mapping[str, int], vocab: Container[str] | None = None) -> Counter[str]:
    """Pieces of words that occur so often -> how often each piece occurs."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for piece in codes.pieces(word, vocab):
            counts[piece] += count
    return counts


def count_words(texts: Iterable[str]) -> Counter[str]:
    """Words of tokenized texts (between spaces and newlines, as fastBPE splits) -> how often each occurs."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.replace("\n", " ").split(" "))
    del counts[""]
    return counts


class Applier:
    """Codes applied to running text, remembering the words already seen, at most `remember` of them."""

    def __init__(self, codes: Codes, vocab: Container[str] | None = None, remember: int = 2_000_000):
        self._codes, self._vocab, self._remember = codes, vocab, remember
        self._seen: dict[str, str] = {"": ""}

    def apply(self, text: str) -> str:
        """Whole lines, newlines included, -> whole lines in pieces."""
        return "\n".join(" ".join(map(self._word, line.split(" "))) for line in text.split("\n"))

    def _word(self, word: str) -> str:
        pieces = self._seen.get(word)
        if pieces is None:
            if len(self._seen) >= self._remember:
                self._seen = {"": ""}
            pieces = self._seen[word] = " ".join(self._codes.pieces(word, self._vocab))
        return pieces


def _join(symbols: list[str], left: str, right: str) -> list[str]:
    """Every left neighbouring a right, from the left on, becomes one symbol."""
    joined: list[str] = []
    i, last = 0, len(symbols) - 1
    while i <= last:
        if i < last and symbols[i] == left and symbols[i + 1] == right:
            joined.append(left + right)
            i += 2
        else:
            joined.append(symbols[i])
            i += 1
    return joined
