"""The way back of the weighted read on a GPU: by row, in one order, so that every run gives the same bits.

The reads of a batch are sorted by row once. A *piece* is a stretch of one row's reads in sorted order; it ends where the
row does, and at every multiple of PIECE reads, so that a row that everyone reads is many programs' work. A row in
one piece is finished by the program that summed it; the pieces of other rows are added up, in order, by a second kernel.

Shapes: N tokens, J reads of a token, M = N * J reads, K rows of width D, U distinct rows read.
"""

# Triton reads the kernels' source, not their types.
# mypy: disallow-untyped-defs=False, disable-error-code="operator,arg-type,index,union-attr,attr-defined,call-arg,misc"
from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pkm.memory.kernels.adam_step import AdamStep
from pkm.memory.kernels.row_sum import RowSum
from pkm.memory.kernels.triton_adam import adam_row, numbers_of

# What happens to the gradient of a row.
STORE = tl.constexpr(0)  # stored at the row's place, if it has one, or added to what this step has stored there
ADAM = tl.constexpr(1)  # applied at once

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
def list_kernel(slots, counts, pieces, piece_slots, rows, M, BLOCK: tl.constexpr):
    """counts (M,): running sums of the marks -> where each piece begins and its row; and rows: the rows read, ascending.
    One more piece, of no row, begins at M."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < M
    count = tl.load(counts + e, mask=inside, other=0)
    before = tl.load(counts + e - 1, mask=(e > 0) & inside, other=0)
    slot = tl.load(slots + e, mask=inside, other=0)
    piece, place = (count >> 32) - 1, (count & LOW) - 1
    begins = inside & ((count >> 32) != (before >> 32))
    tl.store(pieces + piece, e.to(tl.int32), mask=begins)
    tl.store(piece_slots + piece, slot.to(tl.int64), mask=begins)
    tl.store(rows + place, slot, mask=inside & ((count & LOW) != (before & LOW)))
    last = e == M - 1
    tl.store(pieces + piece + 1, (e + 1).to(tl.int32), mask=last)
    tl.store(piece_slots + piece + 1, tl.full([BLOCK], -2, tl.int64), mask=last)


@triton.jit(do_not_specialize=["M"])
def fresh_kernel(rows, counts, places, fresh, M, BLOCK: tl.constexpr):
    """fresh (M,) int32: 1 for those of the distinct rows (U,) that have no place yet."""
    u = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ours = u < (tl.load(counts + M - 1) & LOW)
    row = tl.load(rows + u, mask=ours, other=0).to(tl.int64)
    place = tl.load(places + row, mask=ours, other=0)
    tl.store(fresh + u, (ours & (place < 0)).to(tl.int32), mask=u < M)


@triton.jit(do_not_specialize=["M"])
def place_kernel(rows, ranks, state, places, listed, M, BLOCK: tl.constexpr):
    """ranks (M,) int32: running sums of `fresh` -> places after the state[0] that are taken, and their rows in `listed`."""
    u = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.load(ranks + u, mask=u < M, other=0)
    fresh = (rank != tl.load(ranks + u - 1, mask=(u > 0) & (u < M), other=0)) & (u < M)
    row = tl.load(rows + u, mask=fresh, other=0).to(tl.int64)
    place = tl.load(state) + rank - 1
    tl.store(places + row, place, mask=fresh)
    tl.store(listed + place, row, mask=fresh)


@triton.jit
def _store(grad, place, d, D: tl.constexpr, out, state):
    """Columns d of a row's gradient to its place, added to what an earlier pass left there -> the sum of their squares."""
    at = out + place * D + d
    here = (d < D) & (place >= 0)
    if place < tl.load(state):
        grad += tl.load(at, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(at, grad.to(out.dtype.element_ty), mask=here, eviction_policy="evict_first")
    return tl.sum(tl.where(d < D, grad * grad, 0.0), 0)


@triton.jit(do_not_specialize=["M"])
def rows_kernel(
    pieces, piece_slots, order, counts, weights, grad, table, dots, partial, row_places, state, out, squares,
    mean, square, master, numbers, M,
    J: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BJ: tl.constexpr, PIECE: tl.constexpr,
    MODE: tl.constexpr, MASTER: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """Gradient of rows and, with DOTS, of weights: piece after piece, with all other programs' in between.

    A row of the output's gradient is read once for each slot that its token read: it is to stay in L2, and what passes by
    once, rows and moments, is not to drive it out.
    """
    for piece in range(tl.program_id(0), (tl.load(counts + M - 1) >> 32).to(tl.int32), tl.num_programs(0)):
        begin, end = tl.load(pieces + piece), tl.load(pieces + piece + 1)
        slot = tl.load(piece_slots + piece)
        if slot < 0:
            # Reads of nothing have no gradient.
            for start in range(begin, end, BJ):
                e = start + tl.arange(0, BJ)
                if DOTS:
                    q = tl.load(order + e, mask=e < end, other=0)
                    tl.store(dots + q, tl.zeros([BJ], tl.float32), mask=e < end)
        else:
            before = tl.load(piece_slots + piece - 1, mask=piece > 0, other=-2)
            parted = (before == slot) | (tl.load(piece_slots + piece + 1) == slot)
            total_square = 0.0
            for column in range(0, D, BD):
                d = column + tl.arange(0, BD)
                v = tl.load(table + slot * D + d, mask=d < D, other=0.0, eviction_policy="evict_first").to(tl.float32)
                total = tl.zeros([BD], dtype=tl.float32)
                for start in range(begin, end, BJ):
                    e = start + tl.arange(0, BJ)
                    q = tl.load(order + e, mask=e < end, other=0)
                    w = tl.load(weights + q, mask=e < end, other=0.0)
                    there = (e < end)[:, None] & (d < D)[None, :]
                    at = grad + (q // J)[:, None] * D + d[None, :]
                    g = tl.load(at, mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)
                    total += tl.sum(g * w[:, None], 0)
                    if DOTS:
                        dot = tl.sum(g * v[None, :], 1)
                        if D > BD and column > 0:
                            dot += tl.load(dots + q, mask=e < end, other=0.0)
                        tl.store(dots + q, dot, mask=e < end)
                if parted:
                    part = 2 * (begin // PIECE) + (begin % PIECE != 0).to(tl.int32)
                    tl.store(partial + part.to(tl.int64) * D + d, total, mask=d < D)
                elif MODE == STORE:
                    total_square += _store(total, tl.load(row_places + slot).to(tl.int64), d, D, out, state)
                elif MODE == ADAM:
                    adam_row(total, slot, d, D, table, mean, square, master, numbers, MASTER)
                if D > BD:
                    # The next slice of columns adds to the dots that other threads of this program have stored.
                    tl.debug_barrier()
            if MODE == STORE:
                place = tl.load(row_places + slot)
                tl.store(squares + place, total_square, mask=(parted == 0) & (place >= 0))


@triton.jit(do_not_specialize=["M"])
def join_kernel(
    slots, table, partial, row_places, state, out, squares, mean, square, master, numbers, M,
    D: tl.constexpr, BD: tl.constexpr, PIECE: tl.constexpr, MODE: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    """Add up the pieces of the row, if there is one, that begins in this program's PIECE reads and goes on after them."""
    block = tl.program_id(0).to(tl.int64)
    begin = block * PIECE
    end = begin + PIECE
    slot = tl.load(slots + end - 1).to(tl.int64)
    goes_on = tl.load(slots + end, mask=end < M, other=-2).to(tl.int64) == slot
    from_begin = tl.load(slots + begin).to(tl.int64) == slot
    begun_before = from_begin & (tl.load(slots + begin - 1, mask=begin > 0, other=-2).to(tl.int64) == slot)
    if (slot >= 0) & goes_on & (begun_before == 0):
        total_square = 0.0
        for column in range(0, D, BD):
            d = column + tl.arange(0, BD)
            total = tl.load(partial + (2 * block + (from_begin == 0).to(tl.int64)) * D + d, mask=d < D, other=0.0)
            at = end
            while tl.load(slots + at, mask=at < M, other=-2).to(tl.int64) == slot:
                total += tl.load(partial + 2 * (at // PIECE) * D + d, mask=d < D, other=0.0)
                at += PIECE
            if MODE == STORE:
                total_square += _store(total, tl.load(row_places + slot).to(tl.int64), d, D, out, state)
            else:
                adam_row(total, slot, d, D, table, mean, square, master, numbers, MASTER)
        if MODE == STORE:
            place = tl.load(row_places + slot)
            tl.store(squares + place, total_square, mask=place >= 0)


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
    rows: Tensor
    """(M,): the distinct rows; as many count as `counts` says."""


# Measured on an H100; see benchmarks/results/memory-h100.md.
PIECE = 512
ROWS_BLOCK = 4
ROWS_WARPS = 4
COLUMNS = 2048
PROGRAMS = 1 << 16
"""At most: how many pieces there are only the GPU knows, and each takes every so many-th. Idle ones cost 0.25 us a thousand."""


@lru_cache(maxsize=64)
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where plans are made, while forward goes on."""
    return torch.cuda.Stream(device)


def plan(indices: Tensor) -> Plan:
    """indices (N, J) int32 or int64: on a GPU made beside what follows, and there when `wait_for_plan` returns."""
    if not indices.is_cuda:
        return _plan(indices)
    now, side = torch.cuda.current_stream(indices.device), side_stream(indices.device)
    side.wait_stream(now)
    with torch.cuda.stream(side):
        made = _plan(indices)
    # What either stream frees may not be given away while the other works on it.
    indices.record_stream(side)
    for tensor in made:
        tensor.record_stream(now)
    return made


def wait_for_plan(device: torch.device) -> None:
    """Let the current stream wait, not the CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(side_stream(device))


def empty_plan(indices: Tensor) -> Plan:
    """The tensors of a plan for so many reads, not filled in."""
    reads, new = indices.numel(), indices.new_empty
    return Plan(
        new(reads),
        new(reads, dtype=torch.int64),
        new(reads, dtype=torch.int64),
        new(reads + 1, dtype=torch.int32),
        new(reads + 1, dtype=torch.int64),
        new(reads),
    )


def _plan(indices: Tensor) -> Plan:
    reads = indices.numel()
    if not reads:
        return empty_plan(indices)
    slots, order = torch.sort(indices.flatten(), stable=True)
    grid = (triton.cdiv(reads, 1024),)
    marks = torch.empty(reads, dtype=torch.int64, device=slots.device)
    mark_kernel[grid](slots, marks, reads, PIECE, 1024)
    empty = empty_plan(indices)
    made = empty._replace(slots=slots, order=order, counts=torch.cumsum(marks, 0))
    list_kernel[grid](slots, made.counts, made.pieces, made.piece_slots, made.rows, reads, 1024)
    return made


def enlist(p: Plan, total: RowSum) -> None:
    """Give every row of the plan that has none yet a place in `total`, in ascending order."""
    reads = len(p.slots)
    total.reserve(reads)
    grid = (triton.cdiv(reads, 1024),)
    fresh = torch.empty(reads, dtype=torch.int32, device=p.slots.device)
    fresh_kernel[grid](p.rows, p.counts, total.places, fresh, reads, 1024)
    ranks = torch.cumsum(fresh, 0, dtype=torch.int32)
    total.state[:1].copy_(total.state[1:])
    place_kernel[grid](p.rows, ranks, total.state, total.places, total.rows, reads, 1024)
    total.state[1:].add_(ranks[-1:])


def backward(
    p: Plan,
    grad: Tensor,
    table: Tensor,
    weights: Tensor,
    total: RowSum | None = None,
    step: AdamStep | None = None,
    out: Tensor | None = None,
    dots: bool = True,
) -> Tensor | None:
    """Gradient of `read` by the weights (N, J) fp32, unless `dots` is False; and by the rows, where the caller wants it.

    grad (N, D), table (K, D), weights (N, J)
    total   to add the gradient of the rows that were read to
    step    the update to apply to them instead
    out     (K, D) to write it into instead; other rows are left as they are
    """
    reads, dim = len(p.slots), table.shape[1]
    by_weights = torch.empty(weights.shape, dtype=torch.float32, device=table.device) if dots else None
    if not reads:
        return by_weights
    wait_for_plan(table.device)
    blocks = triton.cdiv(reads, PIECE)
    partial = torch.empty(2 * blocks if blocks > 1 else 1, dim, dtype=torch.float32, device=table.device)
    mode, target = STORE, (partial, partial, partial, partial)  # places, state, gradients, squares
    state = partial, partial, partial, partial
    if step is not None:
        mode = ADAM
        state = step.mean, step.square, table if step.master is None else step.master, numbers_of(step, table.device)
    elif total is not None:
        enlist(p, total)
        target = total.places, total.state, total.values, total.squares
    else:
        places = torch.arange(len(table), dtype=torch.int32, device=table.device)
        nothing, squares = places.new_zeros(1), torch.empty(len(table), device=table.device)
        target = (places, nothing, out, squares) if out is not None else (places.fill_(-1), nothing, partial, squares)
    shared = mode.value, step is not None and step.master is not None
    width = triton.next_power_of_2(dim)
    rows_kernel[(min(reads, len(table) + 1 + blocks, PROGRAMS),)](
        p.pieces, p.piece_slots, p.order, p.counts, weights.float().contiguous(), grad.contiguous(), table,
        partial if by_weights is None else by_weights, partial, *target, *state, reads, weights.shape[1], dim,
        min(width, COLUMNS), ROWS_BLOCK, PIECE, *shared, dots, num_warps=ROWS_WARPS,
    )  # fmt: skip
    if blocks > 1:
        join_kernel[(blocks - 1,)](
            p.slots, table, partial, *target, *state, reads, dim, min(width, 1024), PIECE, *shared, num_warps=4
        )
    return by_weights
