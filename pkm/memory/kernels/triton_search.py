"""Product-key search on a GPU: sub-key scores -> slots and weights, exactly, and the way back for gradients.

Two kernels. The first sorts 32-bit integers that hold a coarse score and a position, and few of them: a bound that no more
than the best can pass leaves few candidates. What it finds it then proves, in the scores themselves: the list falls
strictly, and no other candidate reaches its last one. The second kernel does the rows without a proof (ties, scores
closer than coarse ones can tell, crowded bounds, NaN, infinities) with 64-bit integers and no shortcut but the exact one.

Shapes: N tokens, H heads, R = N * H rows, C sub-keys a side, k selected slots, P pairs that can be among the k best.
"""

# Triton reads the kernels' source, not their types.
# mypy: disallow-untyped-defs=False, disable-error-code="operator,arg-type,index,union-attr,attr-defined,call-arg,misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pkm.memory.kernels.pairs import pair_table

TAKEN = tl.constexpr(-(2**31))  # below every sortable score
LOW = tl.constexpr(0xFFFFFFFF)


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.jit
def _at(x, place: tl.constexpr):
    """x (BR, W) at a place of each row: (BR,)."""
    return tl.max(tl.gather(x, tl.full([x.shape[0], 1], place, tl.int32), 1), 1)


@triton.jit
def _coarse_top(x, high, low, K: tl.constexpr, KEEP: tl.constexpr):
    """The largest of x (BR, W), as far as coarse scores tell: positions (BR, KEEP), largest first, and a bound below the K-th.

    The range from low to high (BR,) is cut into as many steps as the bits beside a position can count; below low all is one.
    """
    W: tl.constexpr = x.shape[1]
    log: tl.constexpr = _log2(W)
    levels: tl.constexpr = (1 << (31 - log)) - 1
    # A little below low, so that rounding cannot make it one with what is smaller.
    size = tl.maximum(high - low, 1e-30) * (1.015625 / levels)
    step = tl.minimum((high[:, None] - x) * (1.0 / size)[:, None], levels * 1.0).to(tl.int32)
    coarse = tl.minimum(tl.maximum(-step + levels, 0), levels)
    # The lower of two positions is the larger number: every bit of it is turned over.
    packed = tl.topk((coarse << log) | (tl.arange(0, W) ^ (W - 1))[None, :], KEEP)
    last = _at(packed >> log, K - 1)
    return (packed & (W - 1)) ^ (W - 1), high + (last - (levels + 1)).to(tl.float32) * size


@triton.jit
def _falls(score, j, K: tl.constexpr, KP: tl.constexpr):
    """(BR,): whether the first K of the scores (BR, KP) fall strictly, NaN never does."""
    following = tl.broadcast_to(tl.minimum(j + 1, KP - 1)[None, :], [score.shape[0], KP])
    fine = (score > tl.gather(score, following, 1)) | (j >= K - 1)[None, :]
    return tl.min(fine.to(tl.int32), 1) == 1


@triton.jit
def _best_groups(
    scores, bias, token_ok, END, C: tl.constexpr, PIECE: tl.constexpr, S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr
):  # fmt: skip
    """The K groups of S neighbours with the largest maxima, as far as coarse scores tell: (BR, KP), and a bound below the K-th
    of these. PIECE scores of a row at a time."""
    BR: tl.constexpr = token_ok.shape[0]
    G: tl.constexpr = PIECE // S
    groups, best = tl.zeros([BR, KP], tl.int32), tl.full([BR, KP], float("-inf"), tl.float32)
    bound = tl.full([BR], float("-inf"), tl.float32)
    for start in range(0, C if PIECE >= C else END, PIECE):
        c = start + tl.arange(0, PIECE)
        x = _scores(scores, bias, token_ok, c, C)
        maxima = tl.max(tl.reshape(x, [BR, G, S]), 2)
        high = tl.max(maxima, 1)
        low = tl.min(tl.where(maxima == float("-inf"), high[:, None], maxima), 1)
        place, low = _coarse_top(maxima, high, low, K, KP)
        group, maximum = start // S + place, tl.gather(maxima, place, 1)
        if PIECE < C:
            # The K best of those so far and of these.
            group = tl.reshape(tl.join(groups, group), [BR, 2 * KP])
            maxima = tl.reshape(tl.join(best, maximum), [BR, 2 * KP])
            low = tl.maximum(bound, low)
            place, low = _coarse_top(maxima, tl.max(maxima, 1), low, K, KP)
            group, maximum = tl.gather(group, place, 1), tl.gather(maxima, place, 1)
        groups, best, bound = group, maximum, low
    return groups, bound


@triton.jit
def _scores(scores, bias, token_ok, c, C: tl.constexpr):
    """Scores of sub-keys c (W,) with their bias: (BR, W), -inf beyond C."""
    x = tl.load(scores[:, None] + c[None, :], mask=token_ok[:, None] & (c < C)[None, :], other=float("-inf"))
    return x + tl.load(bias + c, mask=c < C, other=0.0)[None, :]


@triton.jit
def _half(
    scores, bias, token_ok, END, C: tl.constexpr, PIECE: tl.constexpr, S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr
):  # fmt: skip
    """One side's k best sub-keys of each row.

    scores   pointers (BR,) to the C scores of a row;  bias  pointer to the (C,) that are added to them
    PIECE    scores of a row at a time, all C of them or fewer, so that they fit into registers
    S        neighbours that are first compared as one: the k groups with the largest maxima hold the k best scores
    -> sub-keys (BR, KP) int32, their scores (BR, KP) fp32, and (BR,) whether they are proven right
    """
    BR: tl.constexpr = token_ok.shape[0]
    j = tl.arange(0, KP)
    if S > 1:
        group, low = _best_groups(scores, bias, token_ok, END, C, PIECE, S, K, KP)
        near = tl.reshape(group[:, :, None] * S + tl.arange(0, S)[None, None, :], [BR, KP * S])
        there = token_ok[:, None] & (near < C)
        y = tl.load(scores[:, None] + near, mask=there, other=float("-inf")) + tl.load(
            bias + near, mask=near < C, other=0.0
        )
        place, low = _coarse_top(y, tl.max(y, 1), low, K, KP)
        best, score = tl.gather(near, place, 1), tl.gather(y, place, 1)
    else:
        c = tl.arange(0, PIECE)
        x = _scores(scores, bias, token_ok, c, C)
        high, low = tl.max(x, 1), tl.min(tl.where((c < C)[None, :], x, float("inf")), 1)
        best, low = _coarse_top(x, high, low, K, KP)
        score = tl.gather(x, best, 1)
    # `not below` instead of `reaches`: NaN is counted then, and fails the proof.
    least, reach = _at(score, K - 1)[:, None], tl.zeros([BR], tl.int32)
    for start in range(0, C if PIECE >= C else END, PIECE):
        x = _scores(scores, bias, token_ok, start + tl.arange(0, PIECE), C)
        reach += tl.sum(tl.where(x < least, 0, 1), 1)
    return best, score, _falls(score, j, K, KP) & (reach == K)


@triton.jit
def _write(out_slots, out_weights, row, row_ok, slot, score, K: tl.constexpr, KP: tl.constexpr):
    """Softmax over the k scores of each row, and store slots and weights (R, K)."""
    j = tl.arange(0, KP)
    valid = (j < K)[None, :]
    e = tl.exp(score - _at(score, 0)[:, None])
    e = tl.where(valid, e, 0.0)
    weight = e / tl.sum(e, 1)[:, None]
    out = row.to(tl.int64)[:, None] * K + j[None, :]
    tl.store(out_slots + out, slot, mask=row_ok[:, None] & valid)
    tl.store(out_weights + out, weight, mask=row_ok[:, None] & valid)


@triton.jit
def search_kernel(
    scores, bias, pairs, out_slots, out_weights, unproven, N, END, H: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr,
    S: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, P: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """scores (H, 2, N, C), bias (H, 2, C) fp32, pairs (P,) int32
    -> slots, weights (N * H, K), unproven (N * H,) int8."""
    token = tl.program_id(0) * BR + tl.arange(0, BR)
    head = tl.program_id(1)
    ok = token < N
    row = token * H + head
    first = (2 * head).to(tl.int64)
    one, two = scores + (first * N + token) * C, scores + ((first + 1) * N + token) * C
    i, a, proven = _half(one, bias + first * C, ok, END, C, PIECE, S, K, KP)
    j, b, also = _half(two, bias + (first + 1) * C, ok, END, C, PIECE, S, K, KP)

    pair = tl.load(pairs + tl.arange(0, P))
    there = (pair >= 0)[None, :]
    left = tl.broadcast_to((tl.maximum(pair, 0) // KP)[None, :], [BR, P])
    right = tl.broadcast_to((tl.maximum(pair, 0) % KP)[None, :], [BR, P])
    total = tl.where(there, tl.gather(a, left, 1) + tl.gather(b, right, 1), float("-inf"))
    # Pairs (1, j) and (j, 1) are k candidates each: the least of them bounds the k-th best from below.
    r = tl.arange(0, KP)
    a1, b1 = _at(a, 0), _at(b, 0)
    low = tl.maximum(a1 + _at(b, K - 1), _at(a, K - 1) + b1)
    place, low = _coarse_top(total, a1 + b1, low, K, KP)
    best = tl.gather(total, place, 1)
    # Rounding keeps order: where rounded sums fall strictly, so do the real ones.
    reach = tl.sum(tl.where((total < _at(best, K - 1)[:, None]) | ~there, 0, 1), 1)
    proven = proven & also & _falls(best, r, K, KP) & (reach == K)

    pair = tl.maximum(tl.load(pairs + place), 0)
    slot = tl.gather(i, pair // KP, 1) * C + tl.gather(j, pair % KP, 1)
    _write(out_slots, out_weights, row, ok, slot, best, K, KP)
    tl.store(unproven + row, tl.where(proven, 0, 1).to(tl.int8), mask=ok)


@triton.jit
def _exact_sum(a, b):
    """a + b rounded, and what rounding lost; 0 where that is not finite."""
    total = a + b
    shadow = total - a
    lost = (a - (total - shadow)) + (b - shadow)
    return total, tl.where(tl.abs(lost) < float("inf"), lost, 0.0)


@triton.jit
def _sortable(x):
    """fp32 -> int32 in the same order, above the least int32: NaN above all, the two zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _exact_half(scores, bias, END, C: tl.constexpr, PIECE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """The K best sub-keys of one row, one after the other: (1, KP) and their scores. PIECE scores of it at a time.

    A score and its sub-key are one number of 64 bits, larger for the lower of two sub-keys: the next one is the largest below
    the last.
    """
    j = tl.arange(0, KP)[None, :]
    best, last = tl.zeros([1, KP], tl.int32), tl.full([1], 2**63 - 1, tl.int64)
    for turn in range(K):
        following = tl.full([1], -(2**63), tl.int64)
        for start in range(0, C if PIECE >= C else END, PIECE):
            c = start + tl.arange(0, PIECE)[None, :]
            x = tl.load(scores + c, mask=c < C, other=0.0) + tl.load(bias + c, mask=c < C, other=0.0)
            number = (_sortable(x).to(tl.int64) << 32) | (C - 1 - c)
            here = tl.where((c < C) & (number < last[:, None]), number, -(2**63))
            following = tl.maximum(following, tl.max(here, 1))
        last = following
        best = tl.where(j == turn, (C - 1 - (last & LOW)).to(tl.int32)[:, None], best)
    return best, tl.load(scores + best) + tl.load(bias + best)


@triton.jit
def repair_kernel(
    scores, bias, pairs, out_slots, out_weights, unproven, N, END, H: tl.constexpr,
    C: tl.constexpr, PIECE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Do again, one slot after the other, the rows whose result is unproven; a program looks after ROWS of them."""
    start = tl.program_id(0) * ROWS
    mine = start + tl.arange(0, ROWS)
    flags = tl.load(unproven + mine, mask=mine < N * H, other=0).to(tl.int32)
    p, r = tl.arange(0, P)[None, :], tl.arange(0, KP)[None, :]
    pair = tl.load(pairs + p)
    there = pair >= 0
    pair = tl.maximum(pair, 0)
    to_do = tl.sum(flags, 0)
    while to_do > 0:
        # The next flagged row; taking it off the list ends the loop after as many turns as there are flags.
        offset = tl.min(tl.where(flags != 0, tl.arange(0, ROWS), ROWS), 0)
        flags = tl.where(tl.arange(0, ROWS) == offset, 0, flags)
        to_do -= 1
        row = start + offset
        first = (2 * (row % H)).to(tl.int64)
        i, a = _exact_half(scores + (first * N + row // H) * C, bias + first * C, END, C, PIECE, K, KP)
        j, b = _exact_half(scores + ((first + 1) * N + row // H) * C, bias + (first + 1) * C, END, C, PIECE, K, KP)
        total, lost = _exact_sum(tl.gather(a, pair // KP, 1), tl.gather(b, pair % KP, 1))
        slot = tl.gather(i, pair // KP, 1) * C + tl.gather(j, pair % KP, 1)
        left = tl.where(there, _sortable(total), TAKEN)
        lost = _sortable(lost)
        best_slot, best = tl.zeros([1, KP], tl.int32), tl.zeros([1, KP], tl.float32)
        for turn in range(K):
            # The largest sum; of those the one that rounding made smallest; of those the lowest slot.
            rest = tl.where(left == tl.max(left, 1)[:, None], lost, TAKEN)
            lowest = tl.min(tl.where((rest == tl.max(rest, 1)[:, None]) & (left != TAKEN), slot, 0x7FFFFFFF), 1)
            chosen = (slot == lowest[:, None]) & there
            best_slot = tl.where(r == turn, lowest[:, None], best_slot)
            best = tl.where(r == turn, tl.sum(tl.where(chosen, total, 0.0), 1)[:, None], best)
            left = tl.where(chosen, TAKEN, left)
        rows = row + tl.arange(0, 1)
        _write(out_slots, out_weights, rows, rows < N * H, best_slot, best, K, KP)


@triton.jit
def score_gradient_kernel(
    grad_weights, weights, slots, out, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ZEROS: tl.constexpr
):
    """Gradient of the sub-key scores of one row, of (R, 2, C), into out; the others are (R, K).

    A sub-key in several selected slots gets the sum of theirs, which each of them works out in one order and writes: the same
    number, whoever comes last.
    """
    row = tl.program_id(0).to(tl.int64)
    out += row * (2 * C)
    for start in range(0, 2 * C, ZEROS):
        c = start + tl.arange(0, ZEROS)
        tl.store(out + c, tl.zeros([ZEROS], tl.float32).to(out.dtype.element_ty), mask=c < 2 * C)
    j = tl.arange(0, KP)[None, :]
    slot = tl.load(slots + row * K + j, mask=j < K, other=0)
    # Softmax backward: w (g - sum w g).
    w = tl.load(weights + row * K + j, mask=j < K, other=0.0)
    g = tl.load(grad_weights + row * K + j, mask=j < K, other=0.0)
    g = w * (g - tl.sum(w * g, 1)[:, None])
    # The zeros of all threads are there before any of them writes more.
    tl.debug_barrier()
    total = _sum_by(tl.where(j < K, slot // C, -1), g)
    tl.store(out + slot // C, total.to(out.dtype.element_ty), mask=j < K)
    total = _sum_by(tl.where(j < K, slot % C, -1), g)
    tl.store(out + C + slot % C, total.to(out.dtype.element_ty), mask=j < K)


@triton.jit
def _sum_by(key, x):
    """x (BR, KP) summed over equal keys of a row, at the place of each of them: the same bits at every one."""
    return tl.sum(tl.where(key[:, :, None] == key[:, None, :], x[:, :, None], 0.0), 1)


def search_into(scores: Tensor, bias: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """scores (H, 2, N, C), bias (H, 2, C), fp32 -> into slots int32, weights fp32 (N, H, k); all contiguous.

    -> (N * H,) int8: 1 for rows that the fast kernel could not prove, so that the exact one did them.
    """
    heads, _, tokens, sub_keys = scores.shape
    k = slots.shape[-1]
    rows = tokens * heads
    unproven = torch.empty(rows, dtype=torch.int8, device=scores.device)
    if rows == 0:
        return unproven
    k_width = max(2, triton.next_power_of_2(k))
    width = max(k_width, triton.next_power_of_2(sub_keys))
    group, piece = group_size(width, k_width), piece_size(width, k_width)
    pairs = pair_table(k, k_width, scores.device)
    shape = (tokens, sub_keys, heads, sub_keys)
    search_kernel[(triton.cdiv(tokens, SEARCH_TOKENS), heads)](
        scores, bias, pairs, slots, weights, unproven, *shape, piece, group, k, k_width, len(pairs), SEARCH_TOKENS,
        num_warps=SEARCH_WARPS,
    )  # fmt: skip
    repair_kernel[(triton.cdiv(rows, REPAIR_ROWS),)](
        scores,
        bias,
        pairs,
        slots,
        weights,
        unproven,
        *shape,
        min(width, REPAIR_PIECE),
        k,
        k_width,
        len(pairs),
        REPAIR_ROWS,
        num_warps=1,
    )
    return unproven


def score_gradient(grad_weights: Tensor, weights: Tensor, slots: Tensor, out: Tensor) -> None:
    """Gradient of the sub-key scores into out (N, H, 2, C), whatever is there."""
    tokens, heads, k = slots.shape
    k_width = triton.next_power_of_2(k)
    score_gradient_kernel[(tokens * heads,)](
        grad_weights, weights, slots, out, out.shape[-1], k, k_width, ZEROS, num_warps=1 if k_width <= 32 else 4
    )


ZEROS = 512
# Measured on an H100; see benchmarks/results/memory-h100.md.
SEARCH_TOKENS = 1
SEARCH_WARPS = 1  # Triton 3.6 cannot compile a gather in a tile of fewer numbers than threads
REPAIR_ROWS = 16
WHOLE, PIECE, REPAIR_PIECE = 1024, 512, 512
CANDIDATES = 128


def group_size(width: int, k_width: int) -> int:
    """S: sorting width / S maxima and then k * S scores is least work near the root of width / k. More than CANDIDATES
    scores take too many of a program's registers; and rows in pieces are compared by groups."""
    size = 1
    while (2 * size) ** 2 * k_width <= width and 2 * size * k_width <= CANDIDATES:
        size *= 2
    return max(size, 2) if width > WHOLE else size


def piece_size(width: int, k_width: int) -> int:
    """Scores of a row that are in registers at a time: all of a width up to WHOLE, else PIECE; k groups at least."""
    return width if width <= WHOLE else min(width, max(PIECE, group_size(width, k_width) * k_width))
