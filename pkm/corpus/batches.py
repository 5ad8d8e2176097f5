"""From a split to batches: which windows a step sees is a pure function of (seed, step)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np

from pkm.corpus.store import Split
from pkm.errors import UserError

IGNORE = -100
PAD_ID = 2
ROUNDS = 6


class Permutation:
    """A pseudo-random permutation of range(size) that is computed, not stored.

    A keyed Feistel network permutes the smallest power of two >= size; values beyond `size` are sent through it again
    until they fall inside (cycle walking: Black & Rogaway 2002, "Ciphers with arbitrary finite domains"), less than
    two passes on average.
    """

    def __init__(self, size: int, key: str):
        self.size = size
        bits = max(2, (size - 1).bit_length())
        low, high = bits // 2, bits - bits // 2
        # The halves change roles from round to round, so an odd number of bits needs no larger domain.
        self._widths = [(low, high) if r % 2 == 0 else (high, low) for r in range(ROUNDS)]
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def _network(self, x: np.ndarray) -> np.ndarray:
        for (low, high), key in zip(self._widths, self._keys, strict=True):
            left, right = x >> np.uint64(low), x & np.uint64((1 << low) - 1)
            x = (right << np.uint64(high)) | (left ^ _mixed(right, key, high))
        return x

    def _network_back(self, x: np.ndarray) -> np.ndarray:
        for (low, high), key in zip(reversed(self._widths), reversed(self._keys), strict=True):
            right, left = x >> np.uint64(high), x & np.uint64((1 << high) - 1)
            x = ((left ^ _mixed(right, key, high)) << np.uint64(low)) | right
        return x

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Images of `positions` (any shape, in range(size)), int64."""
        return self._walked(positions, self._network)

    def inverse(self, images: np.ndarray) -> np.ndarray:
        """The positions of `images` (any shape, in range(size)), int64."""
        return self._walked(images, self._network_back)

    def _walked(self, values: np.ndarray, network: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        values = network(np.asarray(values).astype(np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = network(values[outside])
        return values.astype(np.int64)


def _mixed(x: np.ndarray, key: np.uint64, bits: int) -> np.ndarray:
    """A round's function of one half: `bits` bits."""
    mixed = (x + key) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(32)) & np.uint64((1 << bits) - 1)


class TrainingBatches:
    """Batches for training: window i is tokens [i * context, (i + 1) * context], one more than the context for targets.

    Sample number step * sequences + b is the b-th row of a step; every epoch runs through all windows once, in an order
    of its own. Nothing is remembered from step to step, so a run resumes at any of them.
    """

    def __init__(self, split: Split, context: int, sequences: int, seed: int):
        self.split, self.context, self.sequences, self.seed = split, context, sequences, seed
        self.windows = windows(split, context)
        self._order: tuple[int, Permutation] | None = None

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The global batch of a step: (inputs, targets), both (sequences, context) int64."""
        return self.slice(step, 0, self.sequences)

    def slice(self, step: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows [first, last) of the global batch: what one rank takes of it."""
        tokens = np.empty((last - first, self.context + 1), np.int64)
        for row, window in zip(tokens, self.indices(step, first, last).tolist(), strict=True):
            self.split.read_into(window * self.context, row)
        return tokens[:, :-1], tokens[:, 1:]

    def documents(self, step: int, first: int, last: int) -> np.ndarray:
        """The documents that the inputs of these rows are of: (last - first, context) int64."""
        starts = self.indices(step, first, last) * self.context
        return self.split.documents_at(starts[:, None] + np.arange(self.context))

    def indices(self, step: int, first: int, last: int) -> np.ndarray:
        """Which windows rows [first, last) of a step hold, int64."""
        samples = np.arange(step * self.sequences + first, step * self.sequences + last)
        epochs, positions = np.divmod(samples, self.windows)
        found = np.empty_like(samples)
        for epoch in np.unique(epochs).tolist():
            rows = epochs == epoch
            found[rows] = self._permutation(epoch)(positions[rows])
        return found

    def steps_of(self, windows: np.ndarray, before: int) -> np.ndarray:
        """The steps below `before` that hold each window: (epochs begun, len(windows)) int64, -1 where an epoch did not come to it."""
        epochs = -(-before * self.sequences // self.windows)
        found = np.full((epochs, len(windows)), -1)
        for epoch in range(epochs):
            steps = (epoch * self.windows + self._permutation(epoch).inverse(windows)) // self.sequences
            found[epoch] = np.where(steps < before, steps, -1)
        return found

    def _permutation(self, epoch: int) -> Permutation:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, Permutation(self.windows, f"{self.seed}/{epoch}")
        return self._order[1]


def windows(split: Split, context: int) -> int:
    """Windows of an epoch: floor((tokens - 1) / context). UserError if there is not one."""
    if split.tokens == 0:
        raise UserError(f"the {split.name} split is empty", fix="prepare a corpus with text in it")
    if split.tokens < context + 1:
        what = (
            f"the {split.name} split has {split.tokens} tokens, fewer than one window of {context} and its next token"
        )
        smaller = f"choose a context of at most {split.tokens - 1}, or " if split.tokens > 1 else ""
        raise UserError(what, "corpus.context", f"{smaller}prepare more text")
    return (split.tokens - 1) // context


def evaluation_windows(tokens: int, context: int, stride: int) -> int:
    """How many windows score so many tokens."""
    return 1 + max(0, -(-(tokens - 1 - context) // stride))


def evaluation_batches(
    split: Split, context: int, sequences: int, stride: int | None = None, documents: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches that score every token but the first exactly once: (inputs, targets), both (sequences, context) int64.

    Windows start `stride` tokens apart (default: context, so they do not overlap). Where a window overlaps the one
    before it, its tokens are there to be looked at and their targets are IGNORE. Beyond the text inputs are <pad> and
    targets IGNORE; the last batch may hold whole rows of these. `documents`: only so many from the start.
    """
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise UserError(f"a stride of {stride} with windows of {context}", "evaluate.stride", "choose 1 to context")
    total = split.tokens if documents is None else split.document_start(min(documents, split.documents))
    if total < 2:
        raise UserError(f"the {split.name} split has no text to evaluate on", fix="prepare a corpus with held-out text")
    count = evaluation_windows(total, context, stride)
    for first in range(0, count, sequences):
        rows = min(sequences, count - first)
        span = np.full((rows - 1) * stride + context + 1, IGNORE, np.int64)
        text = split.read(first * stride, min(first * stride + len(span), total))
        span[: len(text)] = text
        tokens = np.full((sequences, context + 1), IGNORE, np.int64)
        tokens[:rows] = np.lib.stride_tricks.sliding_window_view(span, context + 1)[::stride]
        inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        inputs[inputs == IGNORE] = PAD_ID
        targets[1 if first == 0 else 0 :, : context - stride] = IGNORE
        yield inputs, targets
