"""Reads and their gradients: the Triton kernels against `reference` and float64, on a GPU where there is one, else in Triton's interpreter.

Not collected by itself: tests/memory/test_triton.py runs it in a process of its own, since Triton decides when it is imported
whether it interprets. `scripts/gpu_check.sh` runs it on a GPU, where sizes are real ones besides.
"""

from __future__ import annotations

import pytest
import torch

from pkm.memory.kernels import (
    adam_step,
    dot_op,
    reference,
    triton_adam,
    triton_dots,
    triton_read,
    triton_rows,
)
from pkm.memory.kernels.row_sum import RowSum
from pkm.memory.values import Values
from tests.support.on_device import DEVICE, DTYPES, GPU, assert_near, on_gpu

# N, J, K, D, largest piece, columns at a time
READS = [
    (7, 6, 10, 20, 8, 2048), (3, 9, 20, 70, 4, 32), (9, 8, 3, 16, 8, 2048), (1, 4, 8, 8, 512, 2048), (6, 5, 6, 1, 4, 2048),
    *on_gpu((1024, 128, 512**2, 1024, 512, 2048), (1000, 48, 50_000, 1600, 512, 512), (1500, 64, 128**2, 100, 512, 2048)),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["random", "hot", "one slot", "padding"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", READS)
def test_read_and_its_gradients_equal_the_references(
    shape: tuple[int, ...], dtype: torch.dtype, index_dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, reads, slots, dim, piece, columns = shape
    if not GPU and (index_dtype, dtype) not in ((torch.int32, torch.float32), (torch.int64, torch.bfloat16)):
        pytest.skip("the interpreter takes one dtype a kind of index")
    monkeypatch.setattr(triton_rows, "PIECE", piece)
    monkeypatch.setattr(triton_rows, "COLUMNS", columns)
    indices = torch.randint(0, slots, (tokens, reads), device=DEVICE, dtype=index_dtype)
    if kind == "hot":
        indices[:, ::2] = slots // 2
    elif kind == "one slot":
        indices.fill_(slots - 1)
    elif kind == "padding":
        indices[::2] = -1
    table = torch.randn(slots, dim, device=DEVICE).to(dtype)
    weights = torch.rand(tokens, reads, device=DEVICE)
    grad = torch.randn(tokens, dim, device=DEVICE).to(dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]

    out = triton_read.read(table, indices, weights, dtype)
    assert_near(out, reference.read(table, indices, weights), tolerance)
    dots, rows, values = gradients(grad, table, indices, weights)
    assert_near(dots, reference.weight_gradient(grad, table, indices), 1e-4)
    expected_rows, expected = reference.row_gradient(grad, indices, weights)
    assert torch.equal(rows, expected_rows)
    assert_near(values, expected, 1e-4)
    dense = torch.zeros(slots, dim, device=DEVICE)
    triton_rows.backward(triton_rows.plan(indices), grad, table, weights, out=dense, dots=False)
    assert_near(dense[rows], expected, 1e-4)
    assert dense.count_nonzero() <= values.numel()
    again = gradients(grad, table, indices, weights)
    assert torch.equal(again[0], dots) and torch.equal(again[2], values), "two runs differ"

    # Products with rows: x is what the gradient was above, and their gradients' weights are the weights.
    assert_near(triton_dots.dots(grad, table, indices), reference.weight_gradient(grad, table, indices), 1e-4)
    receiver = Values(1, 1)
    receiver.weight.data = table
    receiver.collect_rows()
    by_x, _ = dot_op.dots_backward(weights, grad, table, indices, "triton", False)
    assert_near(by_x, reference.read(table, indices, weights), tolerance)
    gradient = receiver.gradient()
    if len(expected_rows) and gradient is not None:
        assert torch.equal(gradient.rows, expected_rows)
        assert_near(gradient.values, expected, 1e-4)
    assert (gradient is None) == (len(expected_rows) == 0)


def gradients(
    grad: torch.Tensor, table: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By the weights; and the rows that were read, and by these."""
    total = RowSum(table)
    dots = triton_rows.backward(triton_rows.plan(indices), grad, table, weights, total)
    # Of rows whose gradient nobody wants.
    alone = triton_rows.backward(triton_rows.plan(indices), grad, table, weights)
    assert dots is not None and alone is not None and torch.equal(alone, dots)
    rows, values = total.sorted() or (
        torch.empty(0, dtype=torch.int64, device=DEVICE),
        torch.empty(0, table.shape[1], device=DEVICE),
    )
    return dots, rows, values


@pytest.mark.parametrize("dim, columns", [(20, 2048), (100, 32), *on_gpu((1024, 2048), (1600, 512))])
def test_gradients_add_up_over_passes_in_one_buffer_and_their_squares_with_them(
    dim: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_rows, "PIECE", 4)
    monkeypatch.setattr(triton_rows, "COLUMNS", columns)
    monkeypatch.setattr(triton_rows, "PROGRAMS", 3)  # each has several pieces to do
    table, total = torch.randn(30, dim, device=DEVICE), RowSum(torch.empty(30, dim, device=DEVICE))
    for turn in range(2):  # the second one begins anew in the buffers of the first
        total.clear()
        whole = torch.zeros(30, dim, device=DEVICE)
        for tokens in (3, 1, 4):
            indices = torch.randint(-1, 30, (tokens, 5), device=DEVICE, dtype=torch.int32)
            indices[:, 1] = 7  # in several pieces of a pass, and in every pass
            weights, grad = torch.rand(tokens, 5, device=DEVICE), torch.randn(tokens, dim, device=DEVICE)
            triton_rows.backward(triton_rows.plan(indices), grad, table, weights, total)
            rows, values = reference.row_gradient(grad, indices, weights)
            whole[rows] += values
            found = total.sorted()
            assert found is not None
            assert torch.equal(found[0], whole.any(1).nonzero().squeeze(1))
            torch.testing.assert_close(found[1], whole[found[0]], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(total.square(), whole.square().sum())
        assert len(total.rows) == 30, turn
    total.clear()
    assert total.sorted() is None and total.square() == 0


@pytest.mark.parametrize("factor", [0.25, float("nan")])
def test_the_sum_is_applied_with_a_factor_that_only_the_gpu_knows(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_adam, "PROGRAMS", 2)
    table, total = torch.randn(9, 6, device=DEVICE), RowSum(torch.empty(9, 6, device=DEVICE))
    indices, weights = torch.randint(0, 9, (4, 2), device=DEVICE), torch.rand(4, 2, device=DEVICE)
    grad, other = torch.randn(4, 6, device=DEVICE), table.clone()
    triton_rows.backward(triton_rows.plan(indices), grad, table, weights, total)
    rows, values = reference.row_gradient(grad, indices, weights)
    steps = [
        adam_step.AdamStep(*torch.zeros(2, 9, 6, device=DEVICE), None, 1e-2, (0.9, 0.99), 1e-8, 1, 1) for _ in "ab"
    ]
    triton_adam.update_sum(total, torch.tensor(factor, device=DEVICE), table, steps[0])
    if factor == factor:
        adam_step.update(rows, values * factor, other, steps[1])
    for ours, theirs in ((table, other), (steps[0].mean, steps[1].mean), (steps[0].square, steps[1].square)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not GPU, reason="a table beyond 2^31 numbers needs a GPU's memory")
def test_rows_beyond_two_to_the_31_numbers_are_read_and_updated() -> None:
    dim, slots = 1024, 2**21 + 5
    table = torch.zeros(slots, dim, dtype=torch.bfloat16, device=DEVICE)
    table[-1] = 1.0
    indices = torch.full((3, 2), slots - 1, dtype=torch.int32, device=DEVICE)
    weights = torch.full((3, 2), 0.5, device=DEVICE)
    assert (triton_read.read(table, indices, weights, torch.float32) == 1).all()
    grad = torch.ones(3, dim, device=DEVICE)
    mean, square = torch.zeros_like(table), torch.zeros_like(table)
    step = adam_step.AdamStep(mean, square, None, 0.5, (0.9, 0.999), 1e-8, 1, 1)
    dots = triton_rows.backward(triton_rows.plan(indices), grad, table, weights, step=step)
    assert dots is not None
    torch.testing.assert_close(dots, torch.full_like(dots, dim))
    torch.testing.assert_close(table[-1].float(), torch.full((dim,), 0.5, device=DEVICE))
    assert table[:-1].count_nonzero() == 0 and mean[:-1].count_nonzero() == 0
