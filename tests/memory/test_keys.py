import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pkm.memory.kernels import reference
from pkm.memory.keys import FlatKeys, ProductKeys, fold


def brute_force(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """All C * C sums in float64, best first, the lowest slot first among equals: scores (rows, 2, C) -> slots, sums (rows, k)."""
    sums = (scores[:, 0, :, None].astype(np.float64) + scores[:, 1, None, :].astype(np.float64)).reshape(
        len(scores), -1
    )
    slots = np.argsort(-sums, axis=1, kind="stable")[:, :k]
    return slots, np.take_along_axis(sums, slots, axis=1)


@st.composite
def scores_and_k(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    sub_keys = draw(st.integers(1, 12))
    k = draw(st.integers(1, sub_keys))
    few = st.sampled_from([-1.0, -0.0, 0.0, 0.5, 1.0, 2.0])
    # Magnitudes within 2^28 of each other, so that float64 sums are exact and a tie there is a real one.
    some = st.integers(-(2**23), 2**23).map(lambda n: np.float32(n) * 2.0**-20) | st.floats(1, 2.0**20, width=32)
    shape = (draw(st.integers(1, 3)), 2, sub_keys)
    return draw(hnp.arrays(np.float32, shape, elements=draw(st.sampled_from([few, some])))), k


@settings(max_examples=300, deadline=None)
@given(scores_and_k())
def test_product_search_equals_brute_force_over_all_slots_in_float64(case: tuple[np.ndarray, int]) -> None:
    scores, k = case
    slots, best = reference.select_product(torch.from_numpy(scores).unsqueeze(1), k)
    expected, sums = brute_force(scores, k)
    np.testing.assert_array_equal(slots.squeeze(1).numpy(), expected)
    np.testing.assert_allclose(best.squeeze(1).numpy(), sums, rtol=2**-23, atol=2**-40)


def test_a_tie_after_rounding_alone_is_no_tie() -> None:
    # In fp32 every sum here rounds to 2^24; as real numbers slot 3 = (1, 1) is the best.
    scores = torch.tensor([[[[0.25, 0.5], [2.0**24, 2.0**24]]]])
    scores[0, 0, 1, 1] += 0.0
    slots, _ = reference.select_product(scores, 2)
    assert slots.flatten().tolist() == [2, 3]


@pytest.mark.parametrize("k", [1, 3, 8])
def test_product_keys_score_a_slot_by_the_inner_product_with_its_whole_key(k: int) -> None:
    keys = ProductKeys(heads=3, sub_keys=8, dim=6).double()
    query = torch.randn(5, 3, 6, dtype=torch.float64)
    whole = torch.cat(
        [
            keys.weight[:, 0].unsqueeze(2).expand(-1, -1, 8, -1),
            keys.weight[:, 1].unsqueeze(1).expand(-1, 8, -1, -1),
        ],
        dim=-1,
    ).flatten(1, 2)  # (H, K, q)
    expected = torch.einsum("nhq,hkq->nhk", query, whole).topk(k)
    slots, scores = keys.search(query, k)
    assert torch.equal(slots, expected.indices)
    torch.testing.assert_close(scores, expected.values)


def test_flat_search_equals_brute_force_and_the_lowest_slot_wins_a_tie() -> None:
    keys = FlatKeys(heads=2, slots=20, dim=4)
    with torch.no_grad():
        keys.weight.copy_(torch.randint(-1, 2, keys.weight.shape).float())
    query = torch.randint(-1, 2, (7, 2, 4)).float()
    slots, scores = keys.search(query, 5)
    sums = np.einsum("nhq,hkq->nhk", query.double().numpy(), keys.weight.detach().double().numpy())
    expected = np.argsort(-sums, axis=-1, kind="stable")[..., :5]
    np.testing.assert_array_equal(slots.numpy(), expected)
    np.testing.assert_array_equal(scores.detach().numpy(), np.take_along_axis(sums, expected, -1))


@pytest.mark.parametrize("keys", [ProductKeys(2, 4, 6), FlatKeys(2, 16, 6)])
def test_scores_are_differentiable_by_query_and_keys(keys: ProductKeys | FlatKeys) -> None:
    keys = keys.double()
    query = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)

    def scores(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(keys, {"weight": weight}, (q, 2))

    keys.forward = keys.search  # type: ignore[method-assign]
    assert torch.autograd.gradcheck(lambda q, w: scores(q, w)[1], (query, keys.weight))


def test_sub_keys_are_uniform_within_one_over_the_root_of_half_the_query_size() -> None:
    weight = ProductKeys(heads=4, sub_keys=64, dim=128).weight.detach()
    bound = 64**-0.5
    assert weight.abs().max() <= bound
    torch.testing.assert_close(weight.var(), torch.tensor(bound**2 / 3), rtol=0.05, atol=0)
    assert not torch.equal(weight[0, 0], weight[0, 1]) and not torch.equal(weight[0, 0], weight[1, 0])


@pytest.mark.parametrize("mean", [0, 3, 10])
def test_keys_that_are_rounded_to_bf16_score_as_well_whatever_the_mean_of_the_queries(mean: int) -> None:
    heads, keys, dim = 2, 128, 256
    weight = torch.randn(heads, keys, dim) * dim**-0.5
    deviation = torch.rand(heads, dim) + 0.5
    means = mean * deviation * torch.randn(heads, dim).sign()
    query = (torch.randn(400, heads, dim) * deviation + means).bfloat16()
    # As BatchNorm would: normalised with the statistics of these queries, then scaled and shifted.
    gamma, beta = torch.rand(heads, dim) + 0.5, torch.randn(heads, dim) * 0.1
    scale = gamma / query.float().std(0, correction=0)
    shift = beta - query.float().mean(0) * scale
    exact = torch.einsum("nhq,hkq->nhk", query.double() * scale + shift, weight.double())
    rounded, bias = fold(weight, scale, shift, (heads, 1, -1), torch.bfloat16)
    scores = torch.einsum("nhq,hkq->nhk", query.double(), rounded.double()) + bias.unsqueeze(0)
    assert rounded.dtype is torch.bfloat16
    # A key's rounding to 8 bits of precision is 0.0017 of it, root mean square.
    assert (scores - exact).std() / exact.std() < 0.0019


def test_folding_what_is_scaled_to_nothing_stays_finite_and_exact_where_nothing_is_rounded() -> None:
    weight, scale, shift = torch.randn(2, 5, 8), torch.rand(2, 8), torch.randn(2, 8)
    scale[:, :3] = torch.tensor([0.0, 1e-40, 1e-30])
    _, bias = fold(weight, scale, shift, (2, 1, -1), torch.bfloat16)
    exact, plain = fold(weight, scale, shift, (2, 1, -1), torch.float32)
    assert torch.equal(exact, weight * scale.unsqueeze(1)) and torch.isfinite(bias).all()
    torch.testing.assert_close(bias, plain, rtol=0.1, atol=0.1)


def test_what_the_bias_gives_back_has_no_gradient() -> None:
    weight, scale, shift = (torch.randn(shape) for shape in ((2, 5, 8), (2, 8), (2, 8)))
    parts = [t.requires_grad_() for t in (weight, scale, shift)]
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        _, bias = fold(*parts, (2, 1, -1), dtype)  # type: ignore[arg-type]
        gradients.append(torch.autograd.grad(bias.sum(), (weight, shift)))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
