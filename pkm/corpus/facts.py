"""Facts of a corpus, to be asked of a model: a name, a place or a number, and the words of its sentence before it.

Names and places are told from other words by their capitals alone, and a place by the preposition before it: rough, but
the same for every model that is asked. What a capital says nothing of (the first word of a sentence, a headline, a month)
is left out.

A fact counts as seen where a window of training held its last CUE words before the answer, and the answer, whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pkm.corpus.batches import TrainingBatches
from pkm.corpus.store import Split
from pkm.text.vocab import CONTINUES, EOS_ID, UNK_ID, Vocab

Kind = Literal["name", "place", "number"]

CUE = 4
"""Words before an answer that make it the same fact wherever they stand; a prompt has at least as many."""
TAIL = CUE + 1
"""Tokens at the end of a fact that it is looked up by; none has fewer."""
PIECE = 1 << 21
"""Tokens of the split that are looked through at a time."""
TABLE_BITS = 24

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


def facts_in(ids: Sequence[int], vocab: Vocab) -> Iterator[Fact]:
    """Those whose sentence begins within `ids` and whose answer ends there."""
    words = list(_words(ids, vocab))
    texts = [text for text, _, _ in words]
    start = None  # the word that the sentence begins with
    for i, text in enumerate(texts):
        if text in ENDS or text == "":
            start = i + 1
            continue
        if (
            start is None
            or i - start < CUE
            or not texts[i - 1].islower()
            or UNK_ID in ids[words[start][1] : words[i][2]]
        ):
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
        first, end = words[i][1], words[last][2]
        if UNK_ID not in ids[first:end]:
            prompt = tuple(ids[words[start][1] : first])
            yield Fact(kind, prompt, tuple(ids[first:end]), first - words[i - CUE][1])


def _words(ids: Sequence[int], vocab: Vocab) -> Iterator[tuple[str, int, int]]:
    """(text, first, end) of every whole word; of the end of a line the text is "". What is left of a cut word is none."""
    pieces: list[str] = []
    first = 0
    for i, token in enumerate(ids):
        if token == EOS_ID:
            yield "", i, i + 1
            pieces, first = [], i + 1
        else:
            pieces.append(vocab.pieces[token].removesuffix(CONTINUES))
            if vocab.word_ends[token]:
                yield "".join(pieces), first, i + 1
                pieces, first = [], i + 1


def _is_name(word: str) -> bool:
    return word[:1].isupper() and word.isalpha() and len(word) > 1 and word not in NO_NAMES


def when_seen(facts: Sequence[Fact], batches: TrainingBatches, steps: int) -> list[Seen]:
    """Of every fact how often, and when last, the first `steps` steps held it. Reads the training split once."""
    at = _windows_with({fact.statement for fact in facts}, batches)
    found = []
    for fact in facts:
        seen = batches.steps_of(np.array(at.get(fact.statement, ()), np.int64), steps)
        found.append(Seen(int((seen >= 0).sum()), int(seen.max(initial=-1))))
    return found


def _windows_with(statements: set[tuple[int, ...]], batches: TrainingBatches) -> dict[tuple[int, ...], list[int]]:
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
                if whole and tuple(ids[first:end].tolist()) == statement:
                    at[statement].append(window)
    return at


def _hashes(ids: np.ndarray) -> np.ndarray:
    """Of every TAIL tokens in a row: (n,) -> (n - TAIL + 1,) uint64."""
    count = len(ids) - TAIL + 1
    hashed = np.zeros(max(count, 0), np.uint64)
    for i in range(TAIL if count > 0 else 0):
        hashed = (hashed + ids[i : i + count].astype(np.uint64) + np.uint64(1)) * MULTIPLIER
        hashed ^= hashed >> np.uint64(29)
    return hashed * MULTIPLIER


def facts_seen(batches: TrainingBatches, vocab: Vocab, steps: int, wanted: int, seed: int) -> list[Fact]:
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
            _take(found, rng, batches.split.read(window * batches.context, (window + 1) * batches.context), vocab)
            if len(found) - before >= wanted / len(bins):
                break
    return list(found.values())


def facts_held_out(split: Split, context: int, vocab: Vocab, wanted: int, seed: int) -> list[Fact]:
    """About `wanted` facts of a split that is not trained on, found as those that are: in windows of the context."""
    rng = np.random.default_rng(seed)
    found: dict[tuple[int, ...], Fact] = {}
    for window in _some(rng, 0, split.tokens // context, 8 * wanted):
        _take(found, rng, split.read(window * context, (window + 1) * context), vocab)
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


def _take(found: dict[tuple[int, ...], Fact], rng: np.random.Generator, ids: np.ndarray, vocab: Vocab) -> None:
    """Add one fact of a window, if it has any."""
    there = list(facts_in(ids.tolist(), vocab))
    if there:
        fact = there[rng.integers(len(there))]
        found.setdefault(fact.statement, fact)
