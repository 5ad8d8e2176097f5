"""Byte-pair encoding as fastBPE does it: codes, their application to words, and the file formats.

A word is split into characters, the last of which carries `</w>`; then the pairs of the codes are merged, the
lowest-ranked first. Printed pieces end in `@@` where the word goes on.

As filters: python -m pkm.text.bpe {learn N | apply CODES [VOCAB] | vocab} < in > out
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from array import array
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from heapq import heappop, heappush
from itertools import pairwise, repeat
from pathlib import Path

from pkm.errors import UserError, exits_cleanly
from pkm.text.bounded_cache import BoundedCache
from pkm.text.linked_symbols import LONG_WORD, LinkedSymbols
from pkm.text.merges import Merges
from pkm.text.stdin_filter import dies_with_its_reader, read_blocks, run_filter
from pkm.text.vocab import CONTINUES, encode_file, format_counts, read_counts, read_lines

logger = logging.getLogger(__name__)

END = "</w>"

# To fastBPE a character is any byte and the UTF-8 continuation bytes after it, however broken the text is (bytes that
# do not decode come here as surrogates), and a NUL and all that follows belong to the character before.
_CHARACTERS = re.compile("(?:[^\0\udc80-\udcbf]|\\A[\udc80-\udcbf])[\udc80-\udcbf]*(?:\0.*)?|\\A\0.*", re.DOTALL)


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
                fix = "give codes as fastBPE's learnbpe or `python -m pkm.text.bpe learn` writes them"
                others = " (files of subword-nmt have a version line and no counts)"
                raise UserError(f"expected `left right count`, found {line!r}"[:200], where, fix + others)
            left, right, count = fields
            if left + right in made:
                raise UserError(f"the piece {left + right!r} is made twice", where, "remove the line")
            made.add(left + right)
            merges.append((left, right))
            counts.append(int(count))
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
        return encode_file("".join(lines))

    def pieces(self, word: str, vocab: Container[str] | None = None) -> list[str]:
        """A word's pieces as printed: all but the last end in `@@`.

        With a vocabulary, pieces outside it are split back into what they were merged from, down to characters.
        """
        symbols = self.symbols(word)
        pieces = _printed(symbols)
        if vocab is None or all(piece in vocab for piece in pieces):
            return pieces
        kept: list[str] = []
        last = len(symbols) - 1
        for i, symbol in enumerate(symbols):
            self._split_until_known(symbol, i == last, vocab, kept)
        return _printed(kept)

    def symbols(self, word: str) -> list[str]:
        """A word's characters merged as far as the codes go; the last symbol ends in `</w>`."""
        symbols = characters(word)
        if len(symbols) > LONG_WORD:
            return self._merged_long(symbols)
        rank_of, none = self._ranks.get, len(self._ranks)
        ranks = [*map(rank_of, pairwise(symbols), repeat(none))]
        while ranks and (best := min(ranks)) < none:
            # All places of a pair, from the left on, before the next pair is looked for: as fastBPE does it.
            while best in ranks:
                i = ranks.index(best)
                joined = symbols[i] = symbols[i] + symbols.pop(i + 1)
                del ranks[i]
                if i:
                    ranks[i - 1] = rank_of((symbols[i - 1], joined), none)
                if i < len(ranks):
                    ranks[i] = rank_of((joined, symbols[i + 1]), none)
        return symbols

    def _merged_long(self, symbols: list[str]) -> list[str]:
        """What `symbols` does, in time about linear in the word: only the neighbours of a merge are looked at."""
        linked = LinkedSymbols(symbols, "")
        rank_of = self._ranks.get
        places: dict[int, array[int]] = {}
        waiting: list[int] = []

        def note(left: int, right: int) -> None:
            rank = rank_of((symbols[left], symbols[right]))
            if rank is None:
                return
            if rank not in places:
                places[rank] = array("q")
                heappush(waiting, rank)
            places[rank].append(left)

        for i in range(len(symbols) - 1):
            note(i, i + 1)
        while waiting:
            rank = heappop(waiting)
            left, right = self.merges[rank]
            for i in sorted(places.pop(rank)):
                if linked.holds(i, left, right):
                    before, after = linked.join(i, left + right)
                    if before >= 0:
                        note(before, i)
                    if after >= 0:
                        note(i, after)
        return [symbol for symbol in symbols if symbol]

    def _split_until_known(self, symbol: str, final: bool, vocab: Container[str], kept: list[str]) -> None:
        # A list of what is left to do, not a function that calls itself: a piece may be made of thousands of merges.
        left_to_do = [(symbol, final)]
        while left_to_do:
            symbol, final = left_to_do.pop()
            printed = symbol[: -len(END)] if final else symbol + CONTINUES
            if printed in vocab or symbol not in self._parts:
                kept.append(symbol)
            else:
                left, right = self._parts[symbol]
                left_to_do += ((right, final), (left, False))


def characters(word: str) -> list[str]:
    """A word's characters, the last one followed by `</w>`."""
    symbols = list(word) if word.isprintable() else _CHARACTERS.findall(word)
    symbols[-1] += END
    return symbols


def _printed(symbols: list[str]) -> list[str]:
    pieces = [symbol + CONTINUES for symbol in symbols]
    pieces[-1] = symbols[-1][: -len(END)]
    return pieces


def learn(words: Mapping[str, int], merges: int) -> Codes:
    """Learn up to `merges` merges from the counts of tokenized words.

    Stops, with a warning, where no pair is left to merge. Of equally frequent pairs the one whose symbols came first
    is merged first (see Merges).
    """
    learner = Merges(words, characters)
    found: dict[str, tuple[str, str, int]] = {}
    while len(found) < merges and (step := learner.next()) is not None:
        # Text that holds a literal `</w>` can make a piece twice; the codes file may not.
        found.setdefault(step[0] + step[1], step)
    if len(found) < merges:
        logger.warning("only %d of %d merges: the text holds no more pairs", len(found), merges)
    return Codes([(left, right) for left, right, _ in found.values()], [count for _, _, count in found.values()])


def apply(codes: Codes, text: str, vocab: Container[str] | None = None) -> str:
    """Tokenized text -> the same text with every word in pieces; spaces and newlines stay where they are."""
    return Applier(codes, vocab).apply(text)


def count_pieces(codes: Codes, words: Mapping[str, int], vocab: Container[str] | None = None) -> Counter[str]:
    """Counts of words -> how often each piece occurs."""
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
    """Codes applied to running text, with a cache of the pieces of at most `remember` words."""

    def __init__(self, codes: Codes, vocab: Container[str] | None = None, remember: int = 1_000_000):
        self._pieces = BoundedCache(lambda word: " ".join(codes.pieces(word, vocab)) if word else "", remember)

    def apply(self, text: str) -> str:
        """Whole lines, newlines included, -> whole lines in pieces."""
        pieces = self._pieces.__getitem__
        return "\n".join(" ".join(map(pieces, line.split(" "))) for line in text.split("\n"))


@exits_cleanly
def main() -> None:
    """The filters."""
    options = _parser().parse_args()
    if options.command == "apply":
        codes = Codes.load(options.codes)
        vocab = read_counts(options.vocab) if options.vocab else None
        run_filter(Applier(codes, vocab).apply, "surrogateescape")
        return
    words = count_words(read_blocks("surrogateescape"))
    dies_with_its_reader()
    if options.command == "learn":
        if not words:
            raise UserError("there is no word to learn from", where="standard input", fix="give tokenized text")
        sys.stdout.buffer.write(learn(words, options.merges).to_bytes())
    else:
        sys.stdout.buffer.write(format_counts(words))
    sys.stdout.buffer.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pkm.text.bpe", description="Byte-pair encoding as fastBPE does it; stdin to stdout."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    learner = commands.add_parser("learn", help="tokenized text -> codes, as fastBPE's learnbpe")
    learner.add_argument("merges", type=_positive, metavar="N", help="how many merges to learn")
    applier = commands.add_parser("apply", help="tokenized text -> text in pieces, as fastBPE's applybpe")
    applier.add_argument("codes", metavar="CODES", help="file of `left right count` lines")
    applier.add_argument("vocab", metavar="VOCAB", nargs="?", help="file of `piece count` lines: use no other pieces")
    commands.add_parser("vocab", help="text -> `word count` lines, most frequent first, as fastBPE's getvocab")
    return parser


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
