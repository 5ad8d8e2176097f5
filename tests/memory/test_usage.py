import math

import pytest
import torch

from pkm.memory.usage import UsageMeter


def metered(slots: int, indices: list, weights: list) -> UsageMeter:  # type: ignore[type-arg]
    meter = UsageMeter(slots, heads=len(indices[0]))
    meter.update(torch.tensor(indices), torch.tensor(weights))
    return meter


def test_usage_and_kl_are_the_papers() -> None:
    # Two tokens, one head, k = 2, 8 slots: z' = (1.25, 0, 0.5, 0.25, 0...), so z = (5/8, 0, 2/8, 1/8).
    usage = metered(8, [[[0, 2]], [[0, 3]]], [[[0.5, 0.5]], [[0.75, 0.25]]]).result()
    z = [5 / 8, 2 / 8, 1 / 8]
    assert usage.percent == 100 * 3 / 8
    assert usage.kl == pytest.approx(math.log(8) + sum(p * math.log(p) for p in z), rel=1e-14)


def test_a_slot_with_weight_zero_is_not_used() -> None:
    assert metered(4, [[[0, 1]]], [[[1.0, 0.0]]]).result().percent == 25.0


def test_even_use_has_kl_and_gini_zero_and_one_slot_has_the_largest() -> None:
    even = metered(5, [[[0, 1, 2, 3, 4]]], [[[0.2] * 5]]).result()
    assert even.kl == pytest.approx(0, abs=1e-7) and even.gini == pytest.approx(0, abs=1e-7)
    one = metered(5, [[[3]]], [[[1.0]]]).result()
    assert one.kl == pytest.approx(math.log(5)) and one.gini == pytest.approx(4 / 5)


def test_gini_equals_half_the_relative_mean_difference() -> None:
    z = torch.rand(30, dtype=torch.float64)
    meter = UsageMeter(30, 1)
    meter.update(torch.arange(30).view(1, 1, 30), z.view(1, 1, 30))
    expected = (z[:, None] - z[None, :]).abs().mean() / (2 * z.mean())
    assert meter.result().gini == pytest.approx(expected.item(), rel=1e-12)


def test_coverage_is_the_share_of_slots_that_hold_half_of_the_weights() -> None:
    usage = metered(10, [[[0, 1, 2, 3]]], [[[0.5, 0.375, 0.0625, 0.0625]]]).result()
    assert (usage.top50, usage.top90, usage.top99) == (10.0, 30.0, 40.0)


def test_slots_that_two_heads_share_are_counted_per_token_and_pair() -> None:
    # Token 1: heads 0 and 1 share slots 1 and 2, heads 1 and 2 share slot 3, 0 and 2 nothing: 3. Token 2: all share 7: 3.
    meter = metered(9, [[[1, 2], [2, 1], [4, 5]], [[7, 0], [1, 7], [2, 7]]], [[[0.5, 0.5]] * 3] * 2)
    assert meter.result().shared_by_two_heads == pytest.approx((2 + 3) / (2 * 3))


def test_batches_add_up_in_any_order() -> None:
    indices, weights = torch.randint(0, 50, (40, 2, 3)), torch.rand(40, 2, 3)
    whole, parts = UsageMeter(50, 2), UsageMeter(50, 2)
    whole.update(indices, weights)
    for rows in (slice(25, 40), slice(0, 25)):
        parts.update(indices[rows], weights[rows])
    torch.testing.assert_close(parts.weights, whole.weights, rtol=1e-12, atol=0)
    assert torch.equal(parts.counts, whole.counts)


def test_tokens_that_do_not_count_leave_no_trace() -> None:
    indices, weights, counts = torch.randint(0, 50, (40, 2, 3)), torch.rand(40, 2, 3), torch.rand(40) < 0.6
    masked, picked = UsageMeter(50, 2), UsageMeter(50, 2)
    masked.update(indices, weights, counts)
    picked.update(indices[counts], weights[counts])
    assert torch.equal(masked.weights, picked.weights)
    assert torch.equal(masked.counts, picked.counts) and masked.counts[0] == counts.sum()


def test_no_weights_is_an_error_not_a_number() -> None:
    with pytest.raises(ValueError, match="no usage"):
        UsageMeter(4, 1).result()


def on_a_gpu(meter: UsageMeter) -> UsageMeter:
    """It counts as it does there, on this CPU."""
    meter.weights = meter.weights.long()
    return meter


def test_what_a_gpu_counts_is_the_same_in_any_order_and_as_good_as_float64() -> None:
    indices, weights, counts = (
        torch.randint(0, 50, (400, 2, 3)),
        torch.rand(400, 2, 3).softmax(-1),
        torch.rand(400) < 0.6,
    )
    exact, there, again = UsageMeter(50, 2), on_a_gpu(UsageMeter(50, 2)), on_a_gpu(UsageMeter(50, 2))
    recall = torch.tensor(0.75)
    exact.update(indices, weights, counts, recall)
    there.update(indices, weights, counts, recall)
    for order in torch.randperm(400).split(70):
        again.update(indices[order], weights[order], counts[order])
    assert torch.equal(there.weights, again.weights) and torch.equal(there.counts, exact.counts)
    for name, number in vars(exact.result()).items():
        assert vars(there.result())[name] == pytest.approx(number, rel=1e-8)


def test_the_smallest_weight_is_use_and_what_is_no_number_an_error_on_a_gpu_too() -> None:
    meter = on_a_gpu(UsageMeter(4, 1))
    meter.update(torch.tensor([[[0, 1]]]), torch.tensor([[[1.0, 1e-30]]]))
    assert meter.result().percent == 50.0
    meter.update(torch.tensor([[[0, 1]]]), torch.tensor([[[float("nan"), 0.5]]]))
    with pytest.raises(ValueError, match="no usage"):
        meter.result()
