"""Learning byte-pair merges from word counts, in the order and with the counts of fastBPE's learnbpe."""

from __future__ import annotations

import heapq
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from pkm.text.linked_symbols import LONG_WORD, LinkedSymbols

_BITS = 32  # A pair (left, right) of symbol numbers is one integer, so that pairs compare as fastBPE compares them.
_RIGHT = (1 << _BITS) - 1


class Merges:
    """Words as lists of symbol numbers, the counts of all neighbouring pairs, and the merges made so far.

    Symbols are numbered as they come: characters first, then one per merge. Of pairs that occur equally often the one
    with the lowest numbers goes first, which is fastBPE's rule; its numbers for characters follow a hash order, ours
    the characters' frequency (then their code points), so after a first tie between characters the order may differ.
    """

    def __init__(self, words: Mapping[str, int], characters: Callable[[str], Sequence[str]]):
        """words: count of each word; characters: a word's symbols, the last marked as final."""
        spelled = [(characters(word), count) for word, count in words.items()]
        self.symbols = _by_frequency(spelled)
        numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        self._words = [[numbers[symbol] for symbol in symbols] for symbols, _ in spelled]
        self._word_counts = [count for _, count in spelled]
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        for place, word in enumerate(self._words):
            count = self._word_counts[place]
            left = word[0]
            for right in word[1:]:
                pair = left << _BITS | right
                self._counts[pair] += count
                self._places[pair].append(place)
                left = right
        self._long: dict[int, _LongWord] = {
            place: _LongWord(word) for place, word in enumerate(self._words) if len(word) > LONG_WORD
        }
        self._heap = [(-count, pair) for pair, count in self._counts.items()]
        heapq.heapify(self._heap)

    def next(self) -> tuple[str, str, int] | None:
        """Merge the most frequent pair; returns (left, right, count), or None where no pair is left."""
        found = self._most_frequent()
        if found is None:
            return None
        pair, count = found
        left, right = pair >> _BITS, pair & _RIGHT
        changes = self._merge(left, right)
        del self._counts[pair]
        for changed, change in changes.items():
            if changed == pair:
                continue
            self._counts[changed] += change
            if change > 0:
                heapq.heappush(self._heap, (-self._counts[changed], changed))
        return self.symbols[left], self.symbols[right], count

    def _most_frequent(self) -> tuple[int, int] | None:
        """The first pair of the heap whose count is current; counts only fall once a pair is on the heap."""
        heap = self._heap
        while heap:
            negative, pair = heapq.heappop(heap)
            count = self._counts.get(pair, 0)
            if count == -negative and count > 0:
                return pair, count
            if count > 0:
                heapq.heappush(heap, (-count, pair))
        return None

    def _merge(self, left: int, right: int) -> dict[int, int]:
        """Replace the pair by a new symbol in every word that holds it; returns how the counts of pairs change."""
        new = len(self.symbols)
        self.symbols.append(self.symbols[left] + self.symbols[right])
        changes: defaultdict[int, int] = defaultdict(int)
        # A word is noted once for every time that it holds the pair; all of them are merged the first time.
        for place in dict.fromkeys(self._places.pop(left << _BITS | right)):
            if place in self._long:
                self._merge_long(place, left, right, new, changes)
            else:
                self._merge_word(place, left, right, new, changes)
        return changes

    def _merge_long(self, place: int, left: int, right: int, new: int, changes: dict[int, int]) -> None:
        count = self._word_counts[place]
        for pair, times in self._long[place].merge(left, right, new).items():
            changes[pair] += times * count
            if times > 0:
                self._places[pair].append(place)

    def _merge_word(self, place: int, left: int, right: int, new: int, changes: dict[int, int]) -> None:
        word, count = self._words[place], self._word_counts[place]
        merged: list[int] = []
        i, last = 0, len(word) - 1
        while i <= last:
            symbol = word[i]
            if symbol != left or i == last or word[i + 1] != right:
                merged.append(symbol)
                i += 1
                continue
            if merged:
                before = merged[-1] << _BITS
                changes[before | left] -= count
                changes[before | new] += count
                self._places[before | new].append(place)
            i += 2
            if i <= last:
                after = word[i]
                changes[right << _BITS | after] -= count
                changes[new << _BITS | after] += count
                self._places[new << _BITS | after].append(place)
            merged.append(new)
        self._words[place] = merged


class _LongWord:
    """A word as a linked list, with the places of every pair in it, from the left on.

    They stay in that order, because all places of a pair come at once: with the later of its two symbols.
    """

    def __init__(self, symbols: list[int]):
        self._linked = LinkedSymbols(symbols, -1)
        self._places: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))
        for i, (left, right) in enumerate(pairwise(symbols)):
            self._places[left << _BITS | right].append(i)

    def merge(self, left: int, right: int, new: int) -> dict[int, int]:
        """Replace the pair wherever it is; returns how often other pairs came (above 0) or went (below)."""
        linked, symbols = self._linked, self._linked.symbols
        changes: defaultdict[int, int] = defaultdict(int)
        for i in self._places.pop(left << _BITS | right, ()):
            if not linked.holds(i, left, right):
                continue
            before, after = linked.join(i, new)
            if before >= 0:
                changes[symbols[before] << _BITS | left] -= 1
                changes[symbols[before] << _BITS | new] += 1
                self._places[symbols[before] << _BITS | new].append(before)
            if after >= 0:
                changes[right << _BITS | symbols[after]] -= 1
                changes[new << _BITS | symbols[after]] += 1
                self._places[new << _BITS | symbols[after]].append(i)
        return changes


def _by_frequency(spelled: Sequence[tuple[Sequence[str], int]]) -> list[str]:
    """All symbols, the most frequent first; equally frequent ones in the order of their code points."""
    counts: defaultdict[str, int] = defaultdict(int)
    for symbols, count in spelled:
        for symbol in symbols:
            counts[symbol] += count
    return sorted(counts, key=lambda symbol: (-counts[symbol], symbol))
