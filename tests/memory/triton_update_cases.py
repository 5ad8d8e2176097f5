"""Updates of the rows that were read: the Triton kernels against `reference` and float64, on a GPU where there is one, else in Triton's interpreter.

Not collected by itself: tests/memory/test_triton.py runs it in a process of its own, since Triton decides when it is imported
whether it interprets. `scripts/gpu_check.sh` runs it on a GPU, where sizes are real ones besides.
"""

from __future__ import annotations

import pytest
import torch

from pkm.memory.kernels import (
    adam_step,
    reference,
    triton_adam,
    triton_rows,
)
from tests.support.on_device import DEVICE, GPU, on_gpu


@pytest.mark.parametrize("values", ["fp32", "bf16", "bf16+master"])
@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(6, 5, 9, 20, 8), *on_gpu((2048, 64, 128**2, 256, 512))])
def test_fused_and_sparse_updates_equal_the_plain_one(
    shape: tuple[int, ...], values: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, reads, slots, dim, piece = shape
    monkeypatch.setattr(triton_rows, "PIECE", piece)
    indices = torch.randint(0, slots, (tokens, reads), device=DEVICE, dtype=torch.int32)
    indices[:, 0] = 3
    weights, grad = torch.rand(tokens, reads, device=DEVICE), torch.randn(tokens, dim, device=DEVICE)
    start = torch.randn(slots, dim, device=DEVICE) * 0.1
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}

    def table_and_step() -> tuple[torch.Tensor, adam_step.AdamStep]:
        table = start.clone() if values == "fp32" else start.bfloat16()
        moments = (torch.full_like(start, 0.1).to(dtype[state]), torch.full_like(start, 0.2).to(dtype[state]))
        master = start.clone() if values == "bf16+master" else None
        return table, adam_step.AdamStep(*moments, master, 1e-2, (0.9, 0.99), 1e-8, 3, 77)

    rows, compact = reference.row_gradient(grad, indices, weights)
    tables = []
    for way in ("plain", "sparse", "in_backward"):
        table, step = table_and_step()
        if way == "plain":
            adam_step.update(rows, compact, table, step)
        elif way == "sparse":
            triton_adam.update(rows, compact, table, step)
        else:
            triton_rows.backward(triton_rows.plan(indices), grad, table, weights, step=step)
        tables.append((table, step))
    # Stochastic rounding may take the other neighbour: one step of bf16.
    close = {torch.float32: dict(rtol=1e-4, atol=1e-6), torch.bfloat16: dict(rtol=2**-7, atol=1e-6)}
    plain, plain_step = tables[0]
    for table, step in tables[1:]:
        torch.testing.assert_close(table, plain, **close[table.dtype])
        torch.testing.assert_close(step.mean, plain_step.mean, **close[step.mean.dtype])
        torch.testing.assert_close(step.square, plain_step.square, **close[step.square.dtype])
        if step.master is not None and plain_step.master is not None:
            torch.testing.assert_close(step.master, plain_step.master, **close[torch.float32])
    untouched = torch.ones(slots, dtype=torch.bool, device=DEVICE)
    untouched[rows] = False
    assert torch.equal(tables[2][0][untouched], table_and_step()[0][untouched])


def test_stochastic_rounding_keeps_the_expected_value() -> None:
    # An update of a tenth of a step of bf16 around 1: rounding to nearest would lose every one of them.
    rows, dim, times = 4, 64, 200 if GPU else 12
    table = torch.ones(rows, dim, dtype=torch.bfloat16, device=DEVICE)
    moments = torch.zeros(2, rows, dim, device=DEVICE)
    lr = 2.0**-8 / 10
    for t in range(1, times + 1):
        step = adam_step.AdamStep(moments[0], moments[1], None, lr, (0.0, 0.0), 1e-12, t, t)
        triton_adam.update(torch.arange(rows, device=DEVICE), torch.ones(rows, dim, device=DEVICE), table, step)
    moved = 1 - table.double().mean().item()
    assert moved == pytest.approx(times * lr, rel=0.15 if GPU else 0.4)


def test_numbers_that_are_not_finite_move_nothing() -> None:
    table, moments = torch.ones(2, 8, device=DEVICE), torch.zeros(2, 2, 8, device=DEVICE)
    grad = torch.ones(2, 8, device=DEVICE)
    grad[0, 3], grad[1, 5] = float("nan"), float("inf")
    grad[1, 6] = 1e25  # the square of which is beyond fp32
    step = adam_step.AdamStep(moments[0], moments[1], None, 0.1, (0.9, 0.999), 1e-8, 1, 1)
    triton_adam.update(torch.arange(2, device=DEVICE), grad, table, step)
    assert (table == 1).sum() == 3 and torch.isfinite(moments).all()
    assert (moments[0] == 0).sum() == 3 and (moments[1] == 0).sum() == 3


@pytest.mark.parametrize("way", ["sparse", "fused"])
def test_numbers_in_bf16_are_rounded_as_in_plain_pytorch_and_alike_on_any_number_of_ranks(way: str) -> None:
    # Moments that forget at once are the gradient and its square, exactly: what differs is their rounding alone.
    start, grad = torch.randn(9, 24, device=DEVICE).bfloat16(), torch.randn(9, 24, device=DEVICE)
    rows, one = torch.arange(9, device=DEVICE), torch.ones(9, 1, device=DEVICE)
    ends = []
    for plain, first, last in ((True, 0, 24), (False, 0, 24), (False, 0, 8), (False, 8, 24)):
        table, g = start[:, first:last].clone().contiguous(), grad[:, first:last].contiguous()
        moments = torch.zeros_like(table), torch.zeros_like(table)
        step = adam_step.AdamStep(*moments, None, 1e-2, (0.0, 0.0), 1e-8, 3, 2**31 - 2, first)
        if plain:
            adam_step.update(rows, g, table, step)
        elif way == "sparse":
            triton_adam.update(rows, g, table, step)
        else:
            triton_rows.backward(triton_rows.plan(rows.int().unsqueeze(1)), g, table, one, step=step)
        ends.append((*moments, table))
    for plain_one, whole, *parts in zip(*ends, strict=True):
        assert torch.equal(whole, torch.cat(parts, 1))
        if plain_one is not ends[0][2]:
            assert torch.equal(plain_one, whole)
    assert not torch.equal(ends[0][0], grad.bfloat16())
