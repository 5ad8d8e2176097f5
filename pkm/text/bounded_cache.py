"""A cache of results that cannot outgrow its bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

LONGEST = 64
"""Longer keys are not cached: they seldom come again, and a bound on entries must be one on memory."""


class BoundedCache(dict[str, Value]):
    """`cache[key]` is compute(key), computed once for as long as the entry is kept.

    Two generations of at most `capacity` / 2 entries each: when the young one is full it becomes the old one, and what
    is asked for again moves back. So entries in use stay, and at most `capacity` are held.
    """

    def __init__(self, compute: Callable[[str], Value], capacity: int):
        super().__init__()
        self._compute = compute
        self._old: dict[str, Value] = {}
        self._half = max(capacity // 2, 1)

    def __missing__(self, key: str) -> Value:
        value = self._old.pop(key, None)
        if value is None:
            value = self._compute(key)
            if len(key) > LONGEST:
                return value
        if len(self) >= self._half:
            self._old = dict(self)
            self.clear()
        self[key] = value
        return value

    def held(self) -> int:
        """Entries of both generations."""
        return len(self) + len(self._old)
