"""Where n-grams stand in a table: a function of ids alone, nothing of it learnt (Engram, 2026, section 3). Imports no torch.

Each of K heads of each order n has rows of its own, as many as a prime; all are one table, one after the other.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from pkm.config.schema import MemoryConfig

SEED = 0
"""Of the multipliers: addresses are the same in every run."""


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


@lru_cache(maxsize=64)
def primes(wanted: int, count: int) -> tuple[int, ...]:
    """The first `count` primes from `wanted` on."""
    found: list[int] = []
    while len(found) < count:
        if is_prime(wanted):
            found.append(wanted)
        wanted += 1
    return tuple(found)


def sizes(config: MemoryConfig, index: int) -> tuple[int, ...]:
    """Rows of each head of each order, of the memory that is number `index` (from 0) of its section: no two are alike anywhere.

    Orders first: (2-grams, head 1), (2-grams, head 2), ..., (3-grams, head 1), ...
    """
    each = config.reads
    return primes(config.slots or 1, each * (index + 1))[each * index :]


def rows(config: MemoryConfig, memories: int) -> int:
    """Rows of all tables of a section of so many memories."""
    return sum(primes(config.slots or 1, config.reads * memories))


def multipliers(layer: int, orders: int, vocabulary: int) -> np.ndarray:
    """(orders,) int64: odd numbers, of which no product with an id below `vocabulary` leaves 63 bits. layer    counted from 0."""
    bound = max(1, (2**63 - 1) // vocabulary // 2)
    return 2 * np.random.default_rng(SEED + 10_007 * layer).integers(0, bound, orders, np.int64) + 1
