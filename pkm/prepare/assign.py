"""What becomes of every article: by its content hash alone, so it is the same however the work was divided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import numpy as np

from pkm.prepare.spool import spooled_index

# Articles sorted at a time: bounds memory to about 50 bytes each.
AT_ONCE = 1 << 22


class Assignment(IntEnum):
    TRAIN = 0
    SAMPLE = 1
    """Training too, and subwords are learned from it."""
    VALID = 2
    TEST = 3
    DUPLICATE = 4
    """The same text as an earlier article, or as a held-out one."""
    NEAR_DUPLICATE = 5
    """Nearly the same text as another article that stays."""
    NOT_TAKEN = 6
    """More of its source than the weights of a mixture ask for."""


STAY_OUT = (Assignment.DUPLICATE, Assignment.NEAR_DUPLICATE, Assignment.NOT_TAKEN)
"""Of no split."""


@dataclass
class Decision:
    """assignments: (articles,) uint8 for every unit. documents and bytes by assignment, over all units."""

    assignments: list[np.ndarray]
    documents: np.ndarray = field(default_factory=lambda: np.zeros(len(Assignment), np.int64))
    bytes: np.ndarray = field(default_factory=lambda: np.zeros(len(Assignment), np.int64))

    @property
    def distinct(self) -> int:
        return int(self.documents.sum() - self.documents[[*STAY_OUT]].sum())


def decide(
    stems: Sequence[Path],
    valid: int,
    test: int,
    sample_bytes: int,
    keep_duplicates: bool,
    fixed: Sequence[np.ndarray] | None = None,
) -> Decision:
    """The assignment of every spooled article.

    Of articles with equal text the first in input order stands for all. In ascending order of hash, the first `valid`
    texts are the validation split, the next `test` the test split, and those that follow the sample, until it has
    `sample_bytes`. If there are not enough texts, fewer are held out: the caller compares the counts.
    Memory: one byte an article, and what AT_ONCE says.

    fixed: by unit, (articles,) uint8: what was decided before (one of STAY_OUT), 0 for all others
    """
    indices = [spooled_index(stem) for stem in stems]
    decision = Decision(
        [np.zeros(len(index), np.uint8) for index in indices] if fixed is None else [known.copy() for known in fixed]
    )
    before = np.concatenate([np.empty(0, np.uint8), *decision.assignments])
    decision.documents += np.bincount(before[before > 0], minlength=len(Assignment))
    ranked, sampled = 0, 0
    for unit, number, entries in _by_hash(indices, fixed):
        assignments, ranked, sampled = _judge(entries, ranked, sampled, valid, test, sample_bytes, keep_duplicates)
        for u in np.unique(unit).tolist():
            decision.assignments[u][number[unit == u]] = assignments[unit == u]
        decision.documents += np.bincount(assignments, minlength=len(Assignment))
        decision.bytes += np.bincount(assignments, entries["bytes"], minlength=len(Assignment)).astype(np.int64)
    return decision


def later_copies(stems: Sequence[Path]) -> list[np.ndarray]:
    """By unit, (articles,) uint8: DUPLICATE for every article whose text an earlier one has, 0 for all others."""
    indices = [spooled_index(stem) for stem in stems]
    found = [np.zeros(len(index), np.uint8) for index in indices]
    for unit, number, entries in _by_hash(indices, None):
        again = ~_first_of_each(entries)
        for u in np.unique(unit[again]).tolist():
            found[u][number[again & (unit == u)]] = Assignment.DUPLICATE
    return found


def _by_hash(
    indices: list[np.ndarray], fixed: Sequence[np.ndarray] | None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """As `_gather`, all articles that are not fixed in ascending order of hash, about AT_ONCE at a time."""
    bits = max(0, (sum(map(len, indices)) // AT_ONCE)).bit_length()
    for part in range(1 << bits):
        unit, number, entries = _gather(indices, fixed, part, bits)
        order = np.lexsort((entries["low"], entries["high"]))
        yield unit[order], number[order], entries[order]


def _gather(
    indices: list[np.ndarray], fixed: Sequence[np.ndarray] | None, part: int, bits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(unit, number within it, entry) of the articles whose hash begins with the `bits` bits of `part`, in input order."""
    units, numbers, entries = [np.empty(0, np.int32)], [np.empty(0, np.int64)], []
    for u, index in enumerate(indices):
        found = np.flatnonzero(index["high"] >> np.uint64(64 - bits) == part) if bits else np.arange(len(index))
        if fixed is not None:
            found = found[fixed[u][found] == 0]
        units.append(np.full(len(found), u, np.int32))
        numbers.append(found)
        entries.append(np.asarray(index[found]))
    return np.concatenate(units), np.concatenate(numbers), np.concatenate(entries) if entries else np.empty(0)


def _first_of_each(entries: np.ndarray) -> np.ndarray:
    """Of entries sorted by hash, those whose hash the one before has not: (articles,) bool."""
    new = np.ones(len(entries), bool)
    new[1:] = (entries["high"][1:] != entries["high"][:-1]) | (entries["low"][1:] != entries["low"][:-1])
    return new


def _judge(
    entries: np.ndarray, ranked: int, sampled: int, valid: int, test: int, sample_bytes: int, keep_duplicates: bool
) -> tuple[np.ndarray, int, int]:
    """(assignments of entries sorted by hash, texts met so far, bytes sampled so far)."""
    new = _first_of_each(entries)
    rank = ranked + np.cumsum(new) - 1
    assignments = np.full(len(entries), Assignment.TRAIN, np.uint8)
    assignments[rank < valid + test] = Assignment.TEST
    assignments[rank < valid] = Assignment.VALID
    trained = assignments == Assignment.TRAIN
    before = sampled + np.cumsum(np.where(trained & new, entries["bytes"], 0).astype(np.int64))
    assignments[trained & new & (before - entries["bytes"] < sample_bytes)] = Assignment.SAMPLE
    assignments[~new & ~(trained & keep_duplicates)] = Assignment.DUPLICATE
    return assignments, ranked + int(new.sum()), int(before[-1]) if len(before) else sampled
