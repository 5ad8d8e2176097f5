"""pkm/corpus/batches.py: what a step sees depends on (seed, step) and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.corpus.batches import IGNORE, PAD_ID, Permutation, TrainingBatches, evaluation_batches
from pkm.errors import UserError

FEW = settings(max_examples=60, deadline=None)


class Tokens:
    """A split whose token i is 1000 + i: where a batch came from can be read off it. Documents of 7 tokens."""

    name = "train"

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.documents = -(-tokens // 7)

    def read_into(self, start: int, out: np.ndarray) -> None:
        assert start >= 0 and start + len(out) <= self.tokens
        out[:] = 1000 + np.arange(start, start + len(out))

    def read(self, start: int, stop: int) -> np.ndarray:
        return 1000 + np.arange(start, min(stop, self.tokens))

    def document_start(self, i: int) -> int:
        return min(7 * i, self.tokens)


@FEW
@given(size=st.integers(1, 5000), key=st.text())
def test_a_permutation_meets_every_position_once(size, key):
    image = Permutation(size, key)(np.arange(size))
    assert np.array_equal(np.sort(image), np.arange(size))


def test_a_permutation_of_a_trillion_is_computed_without_a_list():
    size = 10**12 + 7
    positions = np.arange(size - 2000, size)
    image = Permutation(size, "key")(positions)
    assert len(np.unique(image)) == 2000
    assert image.min() >= 0 and image.max() < size
    # Uniform on average: 2,000 draws have a mean within 5 standard errors (0.29 / sqrt(2000)) of the middle.
    assert abs(image.mean() / size - 0.5) < 5 * 0.29 / 2000**0.5


def test_every_image_is_about_equally_likely_over_keys():
    """Chi-square over 16 positions x 3,000 keys stays below its 99.99 % quantile (15 degrees of freedom: 44.3)."""
    counts = np.zeros((16, 16))
    for key in range(3000):
        counts[np.arange(16), Permutation(16, str(key))(np.arange(16))] += 1
    expected = 3000 / 16
    assert (((counts - expected) ** 2 / expected).sum(axis=1) < 44.3).all()


@FEW
@given(tokens=st.integers(2, 400), context=st.integers(1, 40), sequences=st.integers(1, 9), seed=st.integers(0, 5))
def test_each_epoch_is_a_permutation_of_the_windows(tokens, context, sequences, seed):
    if tokens <= context:
        return
    batches = TrainingBatches(Tokens(tokens), context, sequences, seed)
    n = batches.windows
    steps = -(-3 * n // sequences)
    starts = np.concatenate([batches.batch(step)[0][:, 0] for step in range(steps)])[: 3 * n]
    for epoch in starts.reshape(3, n):
        assert np.array_equal(np.sort(epoch), 1000 + context * np.arange(n))


@FEW
@given(step=st.integers(0, 10**9), cut=st.integers(0, 8), seed=st.integers(0, 99))
def test_slices_of_the_ranks_tile_the_batch(step, cut, seed):
    batches = TrainingBatches(Tokens(1000), 16, 8, seed)
    whole = batches.batch(step)
    parts = [batches.slice(step, 0, cut), batches.slice(step, cut, 8)]
    for side in (0, 1):
        assert np.array_equal(np.concatenate([part[side] for part in parts]), whole[side])


@FEW
@given(order=st.permutations(range(12)))
def test_a_batch_is_a_pure_function_of_seed_and_step(order):
    fresh = [TrainingBatches(Tokens(500), 16, 5, seed=3).batch(step)[0] for step in range(12)]
    batches = TrainingBatches(Tokens(500), 16, 5, seed=3)
    for step in order:
        assert np.array_equal(batches.batch(step)[0], fresh[step])


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed: int, epoch: int) -> list[int]:
        batches = TrainingBatches(Tokens(1601), 16, 100, seed)
        return batches.indices(epoch, 0, 100).tolist()

    orders = [order(1, 0), order(1, 1), order(1, 2), order(2, 0)]
    assert all(sorted(o) == list(range(100)) for o in orders)
    assert len({tuple(o) for o in orders}) == 4
    assert order(1, 0) != list(range(100))


def test_targets_are_the_tokens_that_follow():
    inputs, targets = TrainingBatches(Tokens(1000), 16, 8, seed=0).batch(7)
    assert inputs.shape == targets.shape == (8, 16)
    assert inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(targets, inputs + 1)


@FEW
@given(tokens=st.integers(2, 300), context=st.integers(1, 40), sequences=st.integers(1, 7), part=st.floats(0, 1))
def test_evaluation_scores_each_token_but_the_first_exactly_once_at_any_stride(tokens, context, sequences, part):
    stride = max(1, round(part * context))
    scored = []
    for inputs, targets in evaluation_batches(Tokens(tokens), context, sequences, stride):
        assert inputs.shape == targets.shape == (sequences, context)
        real = targets != IGNORE
        assert np.array_equal(inputs[real] + 1, targets[real])
        scored.append(targets[real])
    assert np.array_equal(np.sort(np.concatenate(scored)), 1000 + np.arange(1, tokens))


@FEW
@given(tokens=st.integers(30, 300), context=st.integers(2, 20), stride=st.integers(1, 20))
def test_with_a_stride_every_scored_token_after_the_first_window_sees_the_full_overlap(tokens, context, stride):
    if stride > context:
        return
    for number, (inputs, targets) in enumerate(evaluation_batches(Tokens(tokens), context, 1, stride)):
        first = int(np.argmax(targets[0] != IGNORE))
        assert first == (0 if number == 0 else context - stride)
        assert (inputs[0, : first + 1] != PAD_ID).all()


def test_evaluation_pads_the_end_and_ignores_it():
    batches = list(evaluation_batches(Tokens(10), context=4, sequences=4))
    assert len(batches) == 1
    inputs, targets = batches[0]
    assert (inputs[3] == PAD_ID).all() and (targets[3] == IGNORE).all()
    assert inputs[2].tolist() == [1008, 1009, PAD_ID, PAD_ID]
    assert targets[2].tolist() == [1009, IGNORE, IGNORE, IGNORE]


def test_evaluation_can_stop_after_some_documents():
    scored = [t[t != IGNORE] for _, t in evaluation_batches(Tokens(100), 16, 2, documents=3)]
    assert np.concatenate(scored).max() == 1000 + 20


def test_an_empty_corpus_and_one_shorter_than_a_window_are_named_with_what_fits():
    with pytest.raises(UserError, match="the train split is empty"):
        TrainingBatches(Tokens(0), 16, 1, 0)
    with pytest.raises(UserError, match=r"has 16 tokens.*window of 16") as caught:
        TrainingBatches(Tokens(16), 16, 1, 0)
    assert "a context of at most 15" in str(caught.value)
    assert TrainingBatches(Tokens(16), 15, 1, 0).windows == 1


def test_a_stride_longer_than_the_context_is_refused():
    with pytest.raises(UserError, match="stride of 17"):
        next(evaluation_batches(Tokens(100), 16, 1, stride=17))


@FEW
@given(size=st.integers(1, 5000), key=st.text())
def test_the_inverse_of_a_permutation_finds_every_position_again(size, key):
    permutation, positions = Permutation(size, key), np.arange(size)
    assert np.array_equal(permutation.inverse(permutation(positions)), positions)


@FEW
@given(tokens=st.integers(20, 300), sequences=st.integers(1, 9), seed=st.integers(0, 5), before=st.integers(0, 40))
def test_the_steps_of_a_window_are_those_whose_batches_hold_it(tokens, sequences, seed, before):
    batches = TrainingBatches(Tokens(tokens), 16, sequences, seed)
    expected = [set() for _ in range(batches.windows)]
    for step in range(before):
        for window in batches.indices(step, 0, sequences).tolist():
            expected[window].add(step)
    found = batches.steps_of(np.arange(batches.windows), before)
    times = (found >= 0).sum(0)
    for window, steps in enumerate(expected):
        assert set(found[:, window].tolist()) - {-1} == steps
    assert times.sum() == before * sequences
