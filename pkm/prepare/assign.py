"""What becomes of every article: by its content hash alone, so it is the same however the work was divided."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass
class Decision:
    """assignments: (articles,) uint8 for every unit. documents and bytes by assignment, over all units."""

    assignments: list[np.ndarray]
    documents: np.ndarray = field(default_factory=lambda: np.zeros(len(Assignment), np.int64))
    bytes: np.ndarray = field(default_factory=lambda: np.zeros(len(Assignment), np.int64))

    @property
    def distinct(self) -> int:
        return int(self.documents.sum() - self.documents[Assignment.DUPLICATE])


def decide(stems: Sequence[Path], valid: int, test: int, sample_bytes: int, keep_duplicates: bool) -> Decision:
    """The assignment of every spooled article.

    Of articles with equal text the first in input order stands for all. In ascending order of hash, the first `valid`
    texts are the validation split, the next `test` the test split, and those that follow the sample, until it has
    `sample_bytes`. If there are not enough texts, fewer are held out: the caller compares the counts.
    Memory: one byte an article, and what AT_ONCE says.
    """
    indices = [spooled_index(stem) for stem in stems]
    decision = Decision([np.zeros(len(index), np.uint8) for index in indices])
    bits = max(0, (sum(map(len, indices)) // AT_ONCE)).bit_length()
    ranked, sampled = 0, 0
    for part in range(1 << bits):
        unit, number, entries = _gather(indices, part, bits)
        order = np.lexsort((entries["low"], entries["high"]))
        entries, unit, number = entries[order], unit[order], number[order]
        assignments, ranked, sampled = _judge(entries, ranked, sampled, valid, test, sample_bytes, keep_duplicates)
        for u in np.unique(unit).tolist():
            decision.assignments[u][number[unit == u]] = assignments[unit == u]
        decision.documents += np.bincount(assignments, minlength=len(Assignment))
        decision.bytes += np.bincount(assignments, entries["bytes"], minlength=len(Assignment)).astype(np.int64)
    return decision


def _gather(indices: list[np.ndarray], part: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(unit, number within it, entry) of the articles whose hash begins with the `bits` bits of `part`, in input order."""
    units, numbers, entries = [np.empty(0, np.int32)], [np.empty(0, np.int64)], []
    for u, index in enumerate(indices):
        found = np.flatnonzero(index["high"] >> np.uint64(64 - bits) == part) if bits else np.arange(len(index))
        units.append(np.full(len(found), u, np.int32))
        numbers.append(found)
        entries.append(np.asarray(index[found]))
    return np.concatenate(units), np.concatenate(numbers), np.concatenate(entries) if entries else np.empty(0)


def _judge(
    entries: np.ndarray, ranked: int, sampled: int, valid: int, test: int, sample_bytes: int, keep_duplicates: bool
) -> tuple[np.ndarray, int, int]:
    """(assignments of entries sorted by hash, texts met so far, bytes sampled so far)."""
    new = np.ones(len(entries), bool)
    new[1:] = (entries["high"][1:] != entries["high"][:-1]) | (entries["low"][1:] != entries["low"][:-1])
    rank = ranked + np.cumsum(new) - 1
    assignments = np.full(len(entries), Assignment.TRAIN, np.uint8)
    assignments[rank < valid + test] = Assignment.TEST
    assignments[rank < valid] = Assignment.VALID
    trained = assignments == Assignment.TRAIN
    before = sampled + np.cumsum(np.where(trained & new, entries["bytes"], 0).astype(np.int64))
    assignments[trained & new & (before - entries["bytes"] < sample_bytes)] = Assignment.SAMPLE
    assignments[~new & ~(trained & keep_duplicates)] = Assignment.DUPLICATE
    return assignments, ranked + int(new.sum()), int(before[-1]) if len(before) else sampled
