"""Search: the Triton kernels against `reference` and float64, on a GPU where there is one, else in Triton's interpreter.

Not collected by itself: tests/memory/test_triton.py runs it in a process of its own, since Triton decides when it is imported
whether it interprets. `scripts/gpu_check.sh` runs it on a GPU, where sizes are real ones besides.
"""

from __future__ import annotations

import pytest
import torch

from pkm.memory.kernels import (
    reference,
    search_op,
    triton_search,
)
from tests.support.on_device import DEVICE, GPU, on_gpu

# N, H, C, k
SEARCHES = [
    (2, 2, 16, 4), (1, 1, 64, 16), (2, 1, 48, 12), (1, 1, 1, 1), (2, 1, 12, 12), (1, 2, 100, 1), (1, 1, 128, 8),
    *on_gpu(
        (4096, 4, 512, 32), (4096, 4, 1024, 32), (1000, 3, 128, 16), (777, 2, 384, 48), (300, 1, 2048, 64), (100, 8, 768, 8),
        (64, 1, 64, 64), (501, 4, 4096, 32), (65, 2, 256, 128), (200, 4, 16_384, 32), (33, 1, 11_314, 32),
    ),
]  # fmt: skip


KINDS = ["random", "ties", "equal", "nan", "infinite", "close"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1, 100, 4), (1, 1, 70, 16)])
def test_rows_in_several_pieces_are_searched_as_exactly(
    shape: tuple[int, int, int, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in ("WHOLE", "PIECE", "REPAIR_PIECE"):
        monkeypatch.setattr(triton_search, size, 32)
    test_search_selects_exactly_what_the_reference_selects(shape, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SEARCHES)
def test_search_selects_exactly_what_the_reference_selects(shape: tuple[int, int, int, int], kind: str) -> None:
    tokens, heads, sub_keys, k = shape
    scores = torch.randn(heads, 2, tokens, sub_keys)
    bias = torch.randn(heads, 2, sub_keys) if kind == "random" else torch.zeros(heads, 2, sub_keys)
    if kind == "ties":
        scores = torch.randint(-2, 3, scores.shape).float()
    elif kind == "equal":
        scores.zero_()
    elif kind == "nan":
        scores[:, :, ::2, sub_keys // 2] = float("nan")
    elif kind == "infinite":
        scores[:, 0, :, 0], scores[:, 1, :, sub_keys // 2] = float("inf"), float("-inf")
    elif kind == "close":
        # Neighbours in fp32 around a large number: sums that rounding makes equal.
        scores = (1000 + torch.randint(0, 40, scores.shape) * 2.0**-13).float()
    scores, bias = scores.to(DEVICE), bias.to(DEVICE)
    slots = torch.full((tokens, heads, k), -7, dtype=torch.int32, device=DEVICE)
    weights = torch.full((tokens, heads, k), -7.0, device=DEVICE)
    triton_search.search_into(scores, bias, slots, weights)
    for rows in torch.arange(tokens, device=DEVICE).split(256):
        whole = (scores[:, :, rows] + bias.unsqueeze(2)).permute(2, 0, 1, 3).contiguous()
        expected, best = reference.select_product(whole, k)
        assert torch.equal(slots[rows].long(), expected)
        torch.testing.assert_close(weights[rows], best.softmax(-1), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.skipif(not GPU, reason="says how often the fast kernel suffices at real sizes: needs a GPU")
def test_nearly_every_row_of_random_scores_is_proven_by_the_fast_kernel() -> None:
    for sub_keys in (512, 1024):
        scores = torch.randn(4, 2, 4096, sub_keys, device=DEVICE)
        out = torch.empty(4096, 4, 32, dtype=torch.int32, device=DEVICE), torch.empty(4096, 4, 32, device=DEVICE)
        unproven = triton_search.search_into(scores, torch.zeros(4, 2, sub_keys, device=DEVICE), *out)
        assert unproven.float().mean() < 0.01


@pytest.mark.parametrize("shape", [(5, 2, 16, 4), (3, 1, 12, 12), (4, 2, 48, 3), *on_gpu((3000, 4, 512, 32))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_search_gradients_equal_the_references(
    shape: tuple[int, int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, heads, sub_keys, k = shape
    # Several parts, the last one shorter.
    monkeypatch.setattr(search_op, "GRADIENT_BYTES", 2 * (tokens // 3) * heads * 2 * sub_keys * 4)
    query = torch.randn(tokens, heads, 8, device=DEVICE).to(dtype).requires_grad_()
    keys = torch.randn(heads, 2, sub_keys, 4, device=DEVICE).to(dtype).requires_grad_()
    bias = torch.randn(heads, 2, sub_keys, device=DEVICE).requires_grad_()
    grad = torch.randn(tokens, heads, k, device=DEVICE)
    slots, weights = search_op.search(query, keys, bias, k, "triton")
    ours = torch.autograd.grad(weights, (query, keys, bias), grad)
    halves = query.double().unflatten(-1, (2, -1))
    scores = torch.einsum("nhsq,hscq->nhsc", halves, keys.double()) + bias.double()
    # The same selection, in case float64 sees a tie otherwise.
    first, second = slots.long() // sub_keys, slots.long() % sub_keys
    best = scores[:, :, 0].gather(-1, first) + scores[:, :, 1].gather(-1, second)
    theirs = torch.autograd.grad(best.softmax(-1), (query, keys, bias), grad.double())
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()
