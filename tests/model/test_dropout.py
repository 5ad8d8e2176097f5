import pytest
import torch
import torch.nn.functional as F

from pkm.model.attention import dropped_attention
from pkm.model.dropout import dropout, kept_and_scale


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_numbers_are_dropped_at_the_rate_and_the_others_scaled_so_that_the_mean_stays(rate, dtype):
    n = 1_000_003  # no multiple of the numbers that are drawn at a time
    torch.manual_seed(1)
    x = torch.ones(n, dtype=dtype)
    y = dropout(x, rate, training=True)
    kept = (y != 0).double().mean()
    assert y.dtype is dtype and abs(kept - (1 - rate)) < 4 * (rate * (1 - rate) / n) ** 0.5
    torch.testing.assert_close(y[y != 0].unique(), torch.tensor([1 / (1 - rate)], dtype=dtype), rtol=1e-4, atol=0)
    assert not torch.equal(y, dropout(x, rate, training=True))


@pytest.mark.parametrize("rate", [0.0, 1e-9, 0.2, 1 / 3, 0.999999, 1.0])
def test_what_is_kept_times_the_scale_is_one_and_never_are_all_dropped(rate):
    kept, scale = kept_and_scale(rate)
    assert kept >= 1 and kept * scale == pytest.approx(1 << 16)
    assert abs(kept / (1 << 16) - (1 - rate)) <= 1 / (1 << 16)


def test_neighbouring_numbers_and_masks_of_neighbouring_seeds_are_dropped_independently():
    masks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        masks.append(dropout(torch.ones(400_000), 0.5, training=True) != 0)
    for lag in (1, 2, 3, 4, 128):
        assert abs((masks[0][lag:] == masks[0][:-lag]).double().mean() - 0.5) < 0.004
    assert abs((masks[0] == masks[1]).double().mean() - 0.5) < 0.004


def test_the_mask_depends_on_torchs_generator_alone_and_backward_drops_the_same():
    x = torch.randn(33, 7, requires_grad=True)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        y = dropout(x, 0.3, training=True)
        (grad,) = torch.autograd.grad(y.sum(), x)
        found.append((y, grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    y, grad = found[0]
    torch.testing.assert_close(grad * x, y)


@pytest.mark.parametrize("rate, training", [(0.5, False), (0.0, True)])
def test_nothing_is_dropped_in_evaluation_or_at_a_rate_of_zero(rate, training):
    x = torch.randn(5)
    assert dropout(x, rate, training) is x


def test_attention_with_dropout_is_causal_and_its_mean_that_without():
    q, k, v = torch.randn(3, 2, 3, 6, 4).unbind(0)
    torch.manual_seed(0)
    mean = torch.stack([dropped_attention(q, k, v, 0.2) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=0, atol=0.06)
    changed = [t.clone() for t in (q, k, v)]
    for t in changed:
        t[:, :, 3:] += 1
    results = []
    for given in ((q, k, v), changed):
        torch.manual_seed(0)
        results.append(dropped_attention(*given, 0.2)[:, :, :3])
    assert torch.equal(*results)
