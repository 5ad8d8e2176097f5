"""The vocabulary: subword pieces and their ids, read and written in fastBPE's format (`piece count` a line)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from pkm.errors import UserError

BOS_ID, EOS_ID, PAD_ID, UNK_ID = range(4)
UNIVERSAL = ("<s>", "</s>", "<pad>", "<unk>")
SPECIALS = tuple(f"<special{i}>" for i in range(10))
"""Names of ids 4-13, unused by the framework: free for a user's own marks."""

CONTINUES = "@@"
"""Ends a piece that the next piece of the same word follows."""


class Vocab:
    """Ids of pieces: 0-3 are <s> </s> <pad> <unk>, then the specials (4-13), then the pieces in their given order.

    pieces  every piece, specials first; pieces[id] is the piece of an id
    counts  its count in the text it was made from, 0 for specials
    """

    def __init__(self, pieces: Sequence[str], counts: Sequence[int], specials: Sequence[str] = SPECIALS):
        """`pieces` and `counts` are those of the text, without specials.

        Raises UserError for a piece that comes twice or carries a special's name.
        """
        assert len(pieces) == len(counts)
        marks = [*UNIVERSAL, *specials]
        self.specials = tuple(specials)
        self.pieces = marks + list(pieces)
        self.counts = [0] * len(marks) + list(counts)
        self._ids = {piece: i for i, piece in enumerate(self.pieces)}
        if len(self._ids) < len(self.pieces):
            raise _repeated(self.pieces)
        self.word_ends = np.array([not piece.endswith(CONTINUES) for piece in self.pieces], dtype=bool)
        self.word_ends[: len(marks)] = False
        self.word_ends[UNK_ID] = True

    @classmethod
    def from_counts(cls, counts: Mapping[str, int], threshold: int = 1, specials: Sequence[str] = SPECIALS) -> Vocab:
        """Pieces seen at least `threshold` times, the most frequent first, as fastBPE's getvocab orders them."""
        kept = [(piece, count) for piece, count in by_frequency(counts) if count >= threshold]
        return cls([piece for piece, _ in kept], [count for _, count in kept], specials)

    @classmethod
    def load(cls, path: str | Path, specials: Sequence[str] = SPECIALS) -> Vocab:
        """Read `piece count` lines; line i (from 0) gets id 4 + len(specials) + i.

        Raises UserError naming file:line for anything else, a special's name included.
        """
        counts = read_counts(path, taken=(*UNIVERSAL, *specials))
        return cls(list(counts), list(counts.values()), specials)

    def save(self, path: str | Path) -> None:
        """Write the pieces without the specials in fastBPE's format."""
        Path(path).write_bytes(self.to_bytes())

    def to_bytes(self) -> bytes:
        """The vocabulary file's content."""
        first = self.first
        lines = (f"{piece} {count}\n" for piece, count in zip(self.pieces[first:], self.counts[first:], strict=True))
        return encode_file("".join(lines))

    @property
    def size(self) -> int:
        """Number of ids, specials included."""
        return len(self.pieces)

    @property
    def first(self) -> int:
        """Id of the first piece that is no special."""
        return len(UNIVERSAL) + len(self.specials)

    def id(self, piece: str) -> int:
        """The piece's id; UNK_ID where the vocabulary does not hold it."""
        return self._ids.get(piece, UNK_ID)

    def __contains__(self, piece: object) -> bool:
        return isinstance(piece, str) and self._ids.get(piece, -1) >= self.first


def may_be_a_piece(name: str, escape: bool) -> bool:
    """Whether subwords learned from Moses tokens may hold a piece of this name. escape: they are written with entities.

    Moses splits symbols off whatever stands beside them, so what holds one and anything else is never in a token.
    """
    from pkm.text.moses_rules import split_symbols

    name = name.removesuffix(CONTINUES)
    if escape:
        # With entities these may stand inside a token: &apos;s is one.
        name = name.translate(dict.fromkeys(map(ord, "&#;")))
    return len(split_symbols(name).split()) <= 1


def read_counts(path: str | Path, taken: Iterable[str] = ()) -> dict[str, int]:
    """Read `piece count` lines in their order. Raises UserError naming file:line for anything else.

    taken: pieces that the file may not hold.
    """
    counts: dict[str, int] = {}
    taken = frozenset(taken)
    for number, line in enumerate(read_lines(path), 1):
        fields = [field for field in line.split(" ") if field]
        where = f"{path}:{number}"
        if len(fields) != 2 or not (fields[1].isascii() and fields[1].isdecimal()):
            fix = "give a vocabulary as fastBPE's getvocab or `python -m pkm.text.bpe vocab` writes it"
            raise UserError(f"expected `piece count`, found {line[:100]!r}", where, fix)
        piece, count = fields
        if piece in counts or piece in taken:
            reason = "is the name of a special" if piece in taken else "is there already"
            raise UserError(f"the piece {piece!r} {reason}", where=where, fix="remove the line")
        counts[piece] = int(count)
    if not counts:
        raise UserError("the vocabulary is empty", where=str(path), fix="name a file of `piece count` lines")
    return counts


def by_frequency(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """(piece, count), the most frequent first; equally frequent ones in the order of their UTF-8 bytes."""
    return sorted(counts.items(), key=lambda item: (-item[1], encode_file(item[0])))


def format_counts(counts: Mapping[str, int]) -> bytes:
    """The vocabulary file of these counts."""
    return encode_file("".join(f"{piece} {count}\n" for piece, count in by_frequency(counts)))


def read_lines(path: str | Path) -> list[str]:
    """Lines of a codes or vocabulary file without their ends (newline, or carriage return and newline).

    Raises UserError where the file cannot be read. Bytes that are not UTF-8 come as surrogates.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        fix = "check the path and its permissions"
        raise UserError(f"cannot be read ({error.strerror})", where=str(path), fix=fix) from error
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def encode_file(text: str) -> bytes:
    """Bytes of a file that read_lines reads. Surrogates from undecodable bytes become those bytes again."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        # Surrogates that came from elsewhere, such as a JSON escape, have no bytes: write them as perl does.
        return text.encode("utf-8", "surrogatepass")


def _repeated(pieces: Sequence[str]) -> UserError:
    seen: set[str] = set()
    repeated = next(piece for piece in pieces if piece in seen or seen.add(piece))  # type: ignore[func-returns-value]
    what = f"the piece {repeated!r} comes twice in the vocabulary, or has a special's name"
    return UserError(what, fix="give every piece once and specials names of their own")
