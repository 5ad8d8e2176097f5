"""Facts of a corpus, to be asked of a model: a name, a place or a number, and the words of its sentence before it.

Names and places are told from other words by their capitals alone, and a place by the preposition before it: rough, but
the same for every model that is asked. What a capital says nothing of (the first word of a sentence, a headline, a month)
is left out.

Words are Moses' (pkm.corpus.words), and a fact begins and ends with tokens of the corpus. It counts as seen where a window of
training held its last CUE words before the answer, and the answer, whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pkm.corpus.batches import TrainingBatches
from pkm.corpus.store import Split
from pkm.corpus.words import Word, Words

Kind = Literal["name", "place", "number"]

CUE = 4
"""Words before an answer that make it the same fact wherever they stand; a prompt has at least as many."""
TAIL = CUE + 1
"""Tokens at the end of a fact that it is looked up by; none has fewer."""
PIECE = 1 << 21
"""Tokens of the split that are looked through at a time."""
TABLE_BITS = 24
AROUND = 16
"""Tokens before and after a statement that tell whether words begin and end with it."""

ENDS = (".", "!", "?")
BEFORE_PLACES = ("in", "near", "outside", "across", "throughout")
NO_NAMES = frozenset(
    (
        "I", "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
        "December", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
    )
)  # fmt: skip
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Fact:
    """Ids: of the sentence from its beginning up to the answer, and of the answer; `cue` is how many of the prompt's last count."""

    kind: Kind
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    cue: int

    @property
    def statement(self) -> tuple[int, ...]:
        """The cue and the answer: two facts of the same statement are one."""
        return self.prompt[-self.cue :] + self.answer


@dataclass(frozen=True)
class Seen:
    """How often training held a fact's statement, and in which step for the last time (from 0); -1 = never."""

    times: int
    last: int


def facts_in(ids: Sequence[int], words: Words, unknown_id: int | None) -> Iterator[Fact]:
    """Those whose sentence begins within `ids` and whose answer ends there, both where a token does."""
    found = words(ids)
    texts = [word.text for word in found]
    ended, start = False, None  # the word that the sentence begins with
    for i, (text, first, _) in enumerate(found):
        if text in ENDS or text == "":
            ended, start = True, None
            continue
        if start is None:
            start = i if ended and first is not None else None
            continue
        if i - start < CUE or first is None or not texts[i - 1].islower():
            continue
        if any(c.isdigit() for c in text):
            kind: Kind = "number"
            last = i
        elif _is_name(text) and i + 1 < len(texts):
            kind = "place" if texts[i - 1] in BEFORE_PLACES else "name"
            last = next(j for j in range(i, len(texts)) if j + 1 == len(texts) or not _is_name(texts[j + 1]))
            if last + 1 == len(texts):
                continue  # it may go on beyond these ids
        else:
            continue
        end, cue = found[last].end, _cue(found[start : i + 1])
        if end is not None and cue and unknown_id not in ids[found[start].first : end]:
            yield Fact(kind, tuple(ids[found[start].first : first]), tuple(ids[first:end]), cue)


def _cue(words: Sequence[Word]) -> int:
    """Tokens before the last of these words that hold CUE words before it, and are as many at least; 0 if the words are too few."""
    end = words[-1].first
    assert end is not None
    begins = (end - word.first for word in words[-1 - CUE :: -1] if word.first is not None)
    return next((tokens for tokens in begins if tokens >= CUE), 0)


def _is_name(word: str) -> bool:
    return word[:1].isupper() and word.isalpha() and len(word) > 1 and word not in NO_NAMES


def when_seen(facts: Sequence[Fact], batches: TrainingBatches, words: Words, steps: int) -> list[Seen]:
    """Of every fact how often, and when last, the first `steps` steps held it. Reads the training split once."""
    at = _windows_with({fact.statement for fact in facts}, batches, words)
    found = []
    for fact in facts:
        seen = batches.steps_of(np.array(at.get(fact.statement, ()), np.int64), steps)
        found.append(Seen(int((seen >= 0).sum()), int(seen.max(initial=-1))))
    return found


def _windows_with(
    statements: set[tuple[int, ...]], batches: TrainingBatches, words: Words
) -> dict[tuple[int, ...], list[int]]:
    """The windows that hold each of the statements, from the second token on all as targets; one that holds it twice comes twice."""
    by_key: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for statement in statements:
        by_key[int(_hashes(np.array(statement[-TAIL:]))[0])].append(statement)
    keys = np.array(sorted(by_key), np.uint64)
    table = np.zeros(1 << TABLE_BITS, bool)
    table[keys >> np.uint64(64 - TABLE_BITS)] = True
    at: dict[tuple[int, ...], list[int]] = defaultdict(list)
    longest = max(map(len, statements), default=TAIL)
    total = batches.windows * batches.context + 1
    for start in range(0, total, PIECE):
        # As much of what was looked through before as a statement may be longer than its tail.
        begin = max(0, start - longest)
        ids = batches.split.read(begin, min(start + PIECE + TAIL - 1, total))
        hashes = _hashes(ids[start - begin :])
        maybe = np.flatnonzero(table[hashes >> np.uint64(64 - TABLE_BITS)])
        maybe = maybe[np.isin(hashes[maybe], keys)]
        for place, key in zip((maybe + start - begin).tolist(), hashes[maybe].tolist(), strict=True):
            end = place + TAIL
            for statement in by_key[key]:
                first = end - len(statement)
                window = (begin + first) // batches.context
                whole = first >= 0 and begin + end <= (window + 1) * batches.context + 1 and window < batches.windows
                same = whole and tuple(ids[first:end].tolist()) == statement
                if same and _in_words(batches.split, begin + first, begin + end, words):
                    at[statement].append(window)
    return at


def _in_words(split: Split, first: int, end: int, words: Words) -> bool:
    """Whether words begin and end where these tokens do: 10 is not stated by 100, though a token of it says so."""
    begin = max(first - AROUND, 0)
    found = words(split.read(begin, end + AROUND).tolist())
    return any(w.first == first - begin for w in found) and any(w.end == end - begin for w in found)


def _hashes(ids: np.ndarray) -> np.ndarray:
    """Of every TAIL tokens in a row: (n,) -> (n - TAIL + 1,) uint64."""
    count = len(ids) - TAIL + 1
    hashed = np.zeros(max(count, 0), np.uint64)
    for i in range(TAIL if count > 0 else 0):
        hashed = (hashed + ids[i : i + count].astype(np.uint64) + np.uint64(1)) * MULTIPLIER
        hashed ^= hashed >> np.uint64(29)
    return hashed * MULTIPLIER


def facts_seen(batches: TrainingBatches, words: Words, steps: int, wanted: int, seed: int) -> list[Fact]:
    """About `wanted` facts that the first `steps` steps read, as many of each age (`ages`), each of another window."""
    rng = np.random.default_rng(seed)
    found: dict[tuple[int, ...], Fact] = {}
    bins = ages(steps)
    for youngest, oldest in bins:
        first, end = (steps - oldest) * batches.sequences, (steps - youngest + 1) * batches.sequences
        before = len(found)
        for sample in _some(rng, first, end, 8 * wanted // len(bins)):
            step, row = divmod(sample, batches.sequences)
            window = int(batches.indices(step, row, row + 1)[0])
            _take(found, rng, batches.split, window, batches.context, words)
            if len(found) - before >= wanted / len(bins):
                break
    return list(found.values())


def facts_held_out(split: Split, context: int, words: Words, wanted: int, seed: int) -> list[Fact]:
    """About `wanted` facts of a split that is not trained on, found as those that are: in windows of the context."""
    rng = np.random.default_rng(seed)
    found: dict[tuple[int, ...], Fact] = {}
    for window in _some(rng, 0, split.tokens // context, 8 * wanted):
        _take(found, rng, split, window, context, words)
        if len(found) >= wanted:
            break
    return list(found.values())


def ages(steps: int) -> list[tuple[int, int]]:
    """Ranges (youngest, oldest) of how many steps ago something was, that cover 1 to `steps`: 1-3, 4-15, 16-63, ..."""
    bounds = [1]
    while 4 * bounds[-1] <= steps:
        bounds.append(4 * bounds[-1])
    return [(low, high) for low, high in zip(bounds, [*(b - 1 for b in bounds[1:]), steps], strict=True)]


def _some(rng: np.random.Generator, first: int, end: int, most: int) -> list[int]:
    """At most so many numbers of [first, end) in a random order, none twice."""
    count = end - first
    if count <= 4 * most:
        return (first + rng.permutation(count)[:most]).tolist()
    return list(dict.fromkeys((first + rng.integers(0, count, most)).tolist()))


def _take(
    found: dict[tuple[int, ...], Fact], rng: np.random.Generator, split: Split, window: int, context: int, words: Words
) -> None:
    """Add one fact of a window, if it has any."""
    ids = split.read(window * context, (window + 1) * context).tolist()
    there = list(facts_in(ids, words, split.unknown_id))
    if there:
        fact = there[rng.integers(len(there))]
        found.setdefault(fact.statement, fact)
