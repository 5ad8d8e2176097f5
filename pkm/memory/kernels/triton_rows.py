"""The way back of the weighted read on a GPU: by row, in one order, so that every run gives the same bits.

The reads of a batch are sorted by row once. A *piece* is a stretch of one row's reads in sorted order; it ends where the
row does, and at every multiple of PIECE reads, so that a row that everyone reads is many programs' work. A row in
one piece is finished by the program that summed it; the pieces of other rows are added up, in order, by a second kernel.

Shapes: N tokens, J reads of a token, M = N * J reads, K rows of width D, U distinct rows read.
"""

# Triton reads the kernels' source, not their types.
# mypy: disallow-untyped-defs=False, disable-error-code="operator,arg-type,index,union-attr,attr-defined,call-arg,misc"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pkm.memory.kernels.adam_step import AdamStep
from pkm.memory.kernels.triton_adam import adam_row

# What happens to the gradient of a row.
COMPACT = tl.constexpr(0)  # stored at the row's place among the rows that were read
DENSE = tl.constexpr(1)  # stored at the row
ADAM = tl.constexpr(2)  # applied at once
NOTHING = tl.constexpr(3)  # not wanted

LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit(do_not_specialize=["M"])
def mark_kernel(slots, marks, M, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """marks (M,) int64: bit 32 where a piece begins, bit 0 where a row (0 or above) does."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + e, mask=e < M, other=0)
    before = tl.load(slots + e - 1, mask=(e > 0) & (e < M), other=0)
    new = (e == 0) | (slot != before)
    piece = new | (e % PIECE == 0)
    mark = (piece.to(tl.int64) << 32) | (new & (slot >= 0)).to(tl.int64)
    tl.store(marks + e, mark, mask=e < M)


@triton.jit(do_not_specialize=["M"])
def list_kernel(slots, counts, pieces, piece_slots, places, rows, M, BLOCK: tl.constexpr):
    """counts (M,): running sums of the marks -> where each piece begins, its row and that row's place among the rows read;
    and rows: those rows, ascending. One more piece, of no row, begins at M."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < M
    count = tl.load(counts + e, mask=inside, other=0)
    before = tl.load(counts + e - 1, mask=(e > 0) & inside, other=0)
    slot = tl.load(slots + e, mask=inside, other=0)
    piece, place = (count >> 32) - 1, (count & LOW) - 1
    begins = inside & ((count >> 32) != (before >> 32))
    tl.store(pieces + piece, e.to(tl.int32), mask=begins)
    tl.store(piece_slots + piece, slot.to(tl.int64), mask=begins)
    tl.store(places + piece, place.to(tl.int32), mask=begins)
    tl.store(rows + place, slot, mask=inside & ((count & LOW) != (before & LOW)))
    last = e == M - 1
    tl.store(pieces + piece + 1, (e + 1).to(tl.int32), mask=last)
    tl.store(piece_slots + piece + 1, tl.full([BLOCK], -2, tl.int64), mask=last)


@triton.jit
def _finish(
    grad, slot, place, d, D: tl.constexpr, MODE: tl.constexpr, out, table, mean, square, master, seed,
    lr, b1, one_b1, b2, one_b2, c1, c2, eps, MASTER: tl.constexpr,
):  # fmt: skip
    """What MODE says with columns d of the gradient of row `slot`."""
    if MODE == ADAM:
        adam_row(
            grad, slot, d, D, table, mean, square, master, seed, lr, b1, one_b1, b2, one_b2, c1, c2, eps, MASTER
        )  # fmt: skip
    else:
        at = place if MODE == COMPACT else slot
        tl.store(out + at * D + d, grad.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["seed", "M"])
def rows_kernel(
    pieces, piece_slots, places, order, counts, weights, grad, table, dots, partial, out, mean, square, master, seed,
    lr, b1, one_b1, b2, one_b2, c1, c2, eps, M,
    J: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BJ: tl.constexpr, PIECE: tl.constexpr,
    MODE: tl.constexpr, MASTER: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """Gradient of rows and, with DOTS, of weights: a piece a program. Programs beyond the last piece do nothing."""
    piece = tl.program_id(0)
    if piece >= (tl.load(counts + M - 1) >> 32).to(tl.int32):
        return
    begin, end = tl.load(pieces + piece), tl.load(pieces + piece + 1)
    slot, place = tl.load(piece_slots + piece), tl.load(places + piece).to(tl.int64)
    if slot < 0:
        # Reads of nothing have no gradient.
        for start in range(begin, end, BJ):
            e = start + tl.arange(0, BJ)
            if DOTS:
                q = tl.load(order + e, mask=e < end, other=0)
                tl.store(dots + q, tl.zeros([BJ], tl.float32), mask=e < end)
        return
    for column in range(0, D, BD):
        d = column + tl.arange(0, BD)
        v = tl.load(table + slot * D + d, mask=d < D, other=0.0).to(tl.float32)
        total = tl.zeros([BD], dtype=tl.float32)
        for start in range(begin, end, BJ):
            e = start + tl.arange(0, BJ)
            q = tl.load(order + e, mask=e < end, other=0)
            w = tl.load(weights + q, mask=e < end, other=0.0)
            there = (e < end)[:, None] & (d < D)[None, :]
            g = tl.load(grad + (q // J)[:, None] * D + d[None, :], mask=there, other=0.0).to(tl.float32)
            total += tl.sum(g * w[:, None], 0)
            if DOTS:
                dot = tl.sum(g * v[None, :], 1)
                if D > BD and column > 0:
                    dot += tl.load(dots + q, mask=e < end, other=0.0)
                tl.store(dots + q, dot, mask=e < end)
        before = tl.load(piece_slots + piece - 1, mask=piece > 0, other=-2)
        if (before == slot) | (tl.load(piece_slots + piece + 1) == slot):
            part = 2 * (begin // PIECE) + (begin % PIECE != 0).to(tl.int32)
            tl.store(partial + part.to(tl.int64) * D + d, total, mask=d < D)
        elif MODE != NOTHING:
            _finish(
                total, slot, place, d, D, MODE, out, table, mean, square, master, seed,
                lr, b1, one_b1, b2, one_b2, c1, c2, eps, MASTER,
            )  # fmt: skip
        if D > BD:
            # The next slice of columns adds to the dots that other threads of this program have stored.
            tl.debug_barrier()


@triton.jit(do_not_specialize=["seed", "M"])
def join_kernel(
    slots, counts, table, partial, out, mean, square, master, seed,
    lr, b1, one_b1, b2, one_b2, c1, c2, eps, M,
    D: tl.constexpr, BD: tl.constexpr, PIECE: tl.constexpr, MODE: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of the row, if there is one, that begins in this program's PIECE reads and goes on after them."""
    block = tl.program_id(0).to(tl.int64)
    begin = block * PIECE
    end = begin + PIECE
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    slot = tl.load(slots + end - 1).to(tl.int64)
    goes_on = tl.load(slots + end, mask=end < M, other=-2).to(tl.int64) == slot
    from_begin = tl.load(slots + begin).to(tl.int64) == slot
    begun_before = from_begin & (tl.load(slots + begin - 1, mask=begin > 0, other=-2).to(tl.int64) == slot)
    if (slot >= 0) & goes_on & (begun_before == 0):
        total = tl.load(partial + (2 * block + (from_begin == 0).to(tl.int64)) * D + d, mask=d < D, other=0.0)
        while tl.load(slots + end, mask=end < M, other=-2).to(tl.int64) == slot:
            total += tl.load(partial + 2 * (end // PIECE) * D + d, mask=d < D, other=0.0)
            end += PIECE
        place = (tl.load(counts + begin + PIECE - 1) & LOW) - 1
        _finish(
            total, slot, place, d, D, MODE, out, table, mean, square, master, seed,
            lr, b1, one_b1, b2, one_b2, c1, c2, eps, MASTER,
        )  # fmt: skip


class Plan(NamedTuple):
    """The reads of a batch, sorted by row."""

    slots: Tensor
    """(M,): the row of each read, ascending; reads of nothing (below 0) first."""
    order: Tensor
    """(M,) int64: where the read stands in the batch."""
    counts: Tensor
    """(M,) int64: pieces (upper half) and distinct rows (lower half) up to and with this read."""
    pieces: Tensor
    """(M + 1,) int32: where each piece begins; as many count as `counts` says, and one more at M."""
    piece_slots: Tensor
    """(M + 1,) int64: the row of each piece."""
    places: Tensor
    """(M,) int32: that row's place among the rows that were read."""
    rows: Tensor
    """(M,): the distinct rows; as many count as `counts` says."""

    def counted(self) -> tuple[int, int]:
        """Pieces and distinct rows, U. Waits for the GPU."""
        count = int(self.counts[-1].item())
        return count >> 32, count & 0xFFFFFFFF


# Measured on an H100; see benchmarks/results/memory-h100.md.
PIECE = 512
ROWS_BLOCK = 4
ROWS_WARPS = 4
IDLE_PROGRAMS = 1 << 19
COLUMNS = 2048


def plan(indices: Tensor) -> Plan:
    """indices (N, J) int32 or int64, at least one read."""
    slots, order = torch.sort(indices.flatten(), stable=True)
    reads = len(slots)
    marks = torch.empty(reads, dtype=torch.int64, device=slots.device)
    grid = (triton.cdiv(reads, 1024),)
    mark_kernel[grid](slots, marks, reads, PIECE, 1024)
    counts = torch.cumsum(marks, 0)
    pieces = torch.empty(reads + 1, dtype=torch.int32, device=slots.device)
    piece_slots = torch.empty(reads + 1, dtype=torch.int64, device=slots.device)
    places, rows = torch.empty(reads, dtype=torch.int32, device=slots.device), torch.empty_like(slots)
    list_kernel[grid](slots, counts, pieces, piece_slots, places, rows, reads, 1024)
    return Plan(slots, order, counts, pieces, piece_slots, places, rows)


def backward(
    p: Plan,
    grad: Tensor,
    table: Tensor,
    weights: Tensor,
    out: Tensor | None,
    adam: AdamStep | None,
    dots: Tensor | None,
) -> None:
    """Gradients of `read` where the caller wants them.

    grad    (N, D); table (K, D); weights (N, J)
    out     compact (U, D) or dense (K, D) gradient to fill, or of no rows: it is not wanted; None: `adam` is applied instead
    dots    (N, J) fp32 to fill with the gradient by the weights, or None
    """
    reads, dim = len(p.slots), table.shape[1]
    mode = NOTHING if out is not None and not len(out) else COMPACT
    mode = ADAM if out is None else DENSE if len(out) == len(table) else mode
    width = triton.next_power_of_2(dim)
    blocks = triton.cdiv(reads, PIECE)
    partial = torch.empty(2 * blocks if blocks > 1 else 1, dim, dtype=torch.float32, device=table.device)
    most = min(reads, len(table) + 1 + blocks)
    # Asking how many pieces there are makes the CPU wait; a million idle programs take the GPU a quarter of a millisecond.
    programs = p.counted()[0] if mode != ADAM or most > IDLE_PROGRAMS else most
    state: tuple[Tensor | int, ...] = (partial, partial, partial, 0)
    numbers: tuple[float, ...] = (0.0,) * 8
    if adam is not None:
        state = adam.mean, adam.square, table if adam.master is None else adam.master, adam.noise_seed()
        numbers = adam.numbers()
    shared = mode.value, adam is not None and adam.master is not None
    target = partial if out is None else out
    rows_kernel[(programs,)](
        p.pieces, p.piece_slots, p.places, p.order, p.counts, weights.float().contiguous(), grad.contiguous(), table,
        partial if dots is None else dots, partial, target, *state, *numbers, reads, weights.shape[1], dim,
        min(width, COLUMNS), ROWS_BLOCK, PIECE, *shared, dots is not None, num_warps=ROWS_WARPS,
    )  # fmt: skip
    if blocks > 1 and mode != NOTHING:
        columns = min(width, 1024)
        join_kernel[(blocks - 1, triton.cdiv(dim, columns))](
            p.slots,
            p.counts,
            table,
            partial,
            target,
            *state,
            *numbers,
            reads,
            dim,
            columns,
            PIECE,
            *shared,
            num_warps=4,
        )


def read_backward(
    grad: Tensor, table: Tensor, indices: Tensor, weights: Tensor, want_rows: bool, step: AdamStep | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradient of `read` by the weights (N, J), and where wanted rows (U,) int64 and values (U, D) fp32, unless applied."""
    dots = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
    if not dots.numel():
        return dots.to(weights.dtype), None, None
    p = plan(indices)
    out = None
    if step is None:
        out = torch.empty(p.counted()[1] if want_rows else 0, table.shape[1], dtype=torch.float32, device=table.device)
    backward(p, grad, table, weights, out, step, dots)
    rows = p.rows[: len(out)].long() if want_rows and out is not None else None
    return dots.to(weights.dtype), rows, out if want_rows else None


def row_gradient(
    grad: Tensor, table: Tensor, indices: Tensor, weights: Tensor, step: AdamStep | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradient of `read` by the rows that were read: rows (U,) int64 and values (U, D) fp32, unless `step` is applied instead."""
    if not indices.numel():
        return None, None
    p = plan(indices)
    if step is not None:
        backward(p, grad, table, weights, None, step, None)
        return None, None
    out = torch.empty(p.counted()[1], table.shape[1], dtype=torch.float32, device=table.device)
    backward(p, grad, table, weights, out, None, None)
    return p.rows[: len(out)].long(), out


def dense_gradient(grad: Tensor, table: Tensor, indices: Tensor, weights: Tensor, out: Tensor) -> None:
    """Gradient of `read` by the table into out (K, D), zero where no row was read."""
    if indices.numel():
        backward(plan(indices), grad, table, weights, out, None, None)
