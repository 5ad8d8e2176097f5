"""Sources mixed by weight: which articles of each are taken. By content hashes alone, so that the same are whatever the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pkm.prepare.assign import Assignment
from pkm.prepare.spool import spooled_index


@dataclass(frozen=True)
class Taken:
    """What a mixture takes of one source; shares from 0 to 1, bytes of text (of ids: 4 each)."""

    weight: float
    """Of the source, those of all sources together 1."""
    share: float
    """Of the mixture's bytes, its own: near the weight, as articles are taken whole."""
    documents: int
    bytes: int
    available_documents: int
    available_bytes: int
    ran_out: bool
    """All of it is taken: it ended the mixture, as nothing is repeated."""

    def record(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return asdict(self)

    def line(self, number: int) -> str:
        """For people."""
        left = (
            "all of it: it runs out first" if self.ran_out else f"{self.bytes / max(1, self.available_bytes):.1%} of it"
        )
        return f"source {number}: {self.share:.1%} of the text (weight {self.weight:.3g}), {self.documents:,} articles, {left}"


def mix(
    stems: Sequence[Path], sources: Sequence[int], weights: Sequence[float], fixed: Sequence[np.ndarray]
) -> list[Taken]:
    """Mark in `fixed` what a mixture does not take, and say what it takes.

    sources   the source of every unit
    weights   of the sources, any positive numbers
    fixed     by unit, (articles,) uint8: 0 for articles that may be taken, else their assignment

    The mixture is as large as it can be with nothing repeated: the source that is smallest for its weight is taken whole. Of
    the others the articles with the smallest second halves of their hashes are (the first halves decide what is held out),
    as many as fit the weight. Memory: about 30 bytes an article of the largest source.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    available = []
    for source in range(len(weights)):
        low, size = _articles(stems, sources, fixed, source)
        available.append((len(low), int(size.sum())))
    whole = min(size / share for (_, size), share in zip(available, shares, strict=True))
    counts = []
    for source, (share, of) in enumerate(zip(shares, available, strict=True)):
        # A rounding error must not leave out the last article of the source that is taken whole.
        more = of[1] > share * whole * (1 + 1e-12)
        counts.append(_take(stems, sources, fixed, source, share * whole) if more else of)
    taken = sum(used for _, used in counts)
    return [
        Taken(share, used / max(1, taken), documents, used, *of, used == of[1])
        for share, (documents, used), of in zip(shares, counts, available, strict=True)
    ]


def _articles(
    stems: Sequence[Path], sources: Sequence[int], fixed: Sequence[np.ndarray], source: int
) -> tuple[np.ndarray, np.ndarray]:
    """(second half of the hash, bytes) of a source's articles that may be taken."""
    low, size = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for stem, of, known in zip(stems, sources, fixed, strict=True):
        if of == source:
            index = spooled_index(stem)
            low.append(index["low"][known == 0])
            size.append(index["bytes"][known == 0].astype(np.int64))
    return np.concatenate(low), np.concatenate(size)


def _take(
    stems: Sequence[Path], sources: Sequence[int], fixed: Sequence[np.ndarray], source: int, wanted: float
) -> tuple[int, int]:
    """Mark all but the first articles of a source, in the order of their hashes, with `wanted` bytes; (articles, bytes) taken."""
    low, size = _articles(stems, sources, fixed, source)
    order = np.argsort(low, kind="stable")
    bytes_before = np.cumsum(size[order])
    count = int(np.searchsorted(bytes_before, wanted, side="right"))
    if count == len(order):
        return count, int(bytes_before[-1])
    bound = low[order[count]]
    # Halves of hashes are next to never equal; where they are, all of them stay out.
    count = int(np.searchsorted(low[order], bound, side="left"))
    for stem, of, known in zip(stems, sources, fixed, strict=True):
        if of == source:
            known[(known == 0) & (spooled_index(stem)["low"] >= bound)] = Assignment.NOT_TAKEN
    return count, int(bytes_before[count - 1]) if count else 0
