"""A long word's symbols as a linked list, so that a merge costs the same wherever it is and however long the word is."""

from __future__ import annotations

from array import array
from typing import Generic, TypeVar

LONG_WORD = 100
"""Words of more characters are linked lists; for others a plain list is faster."""

Symbol = TypeVar("Symbol")


class LinkedSymbols(Generic[Symbol]):
    """symbols: the list as given, changed in place; a joined pair stands where its left one was, `gone` at its right."""

    def __init__(self, symbols: list[Symbol], gone: Symbol):
        self.symbols = symbols
        self._gone = gone
        size = len(symbols)
        self._after = array("q", range(1, size + 1))
        self._before = array("q", range(-1, size - 1))
        self._after[-1] = -1

    def holds(self, i: int, left: Symbol, right: Symbol) -> bool:
        """Whether the pair still begins at place i."""
        after = self._after[i]
        return after >= 0 and self.symbols[i] == left and self.symbols[after] == right

    def join(self, i: int, joined: Symbol) -> tuple[int, int]:
        """Replace the pair at place i; returns the places before and after it, -1 where the word ends."""
        symbols, right = self.symbols, self._after[i]
        after = self._after[right]
        symbols[i], symbols[right] = joined, self._gone
        self._after[i] = after
        self._after[right] = -1
        if after >= 0:
            self._before[after] = i
        return self._before[i], after
