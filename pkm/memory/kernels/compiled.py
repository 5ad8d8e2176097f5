"""Loops of a memory on a CPU that numba compiles to machine code: what plain PyTorch and NumPy have no quick words for.

Each works on one part of a job in one thread and lets Python go meanwhile (`nogil`), so that parts run beside each other.
What they compiled stays in numba's cache on disk: seconds at the first step ever on a machine, a part of one in later runs.

Shapes: N tokens, C sub-keys a side, k selected slots, U rows of width D to update.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])
LANES = 32  # numbers that compiled loops take at a time
LOW = np.int32(0x7FFFFFFF)
NOT_FINITE = np.int32(0x7F800000)  # bits of infinity: those of NaN are larger
LEAST = np.int32(-0x80000000)  # the bits of -0.0; and below every number that `in_order` gives
LEAST_KEY = np.int64(-0x7FFFFFFFFFFFFFFF)
HALVINGS = 12


def jit(function: F, fastmath: object = False) -> F:
    """`function` in machine code; as it stands: an exact sum may lose nothing to operations that become one."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no directory to keep it in
        return numba.njit(**options)(function)


LARGEST = np.float32(3e38)  # as pkm.memory.kernels.adam_step has it
jit_contracted = partial(jit, fastmath={"contract"})  # a * b + c as one operation
jit_reordered = partial(jit, fastmath={"contract", "reassoc"})  # besides, sums in an order that lanes can add up


@jit
def in_order(bits: Any) -> Any:
    """Bits of a number of fp32 <-> an int32 that grows with the number."""
    return np.int32(bits ^ (np.int32(bits >> np.int32(31)) & LOW))


@jit
def _largest(
    scores: Array,
    bias: Array,
    k: int,
    places: Array,
    sums: Array,
    ordered: Array,
    keys: Array,
    one: Array,
    one_bits: Array,
) -> bool:
    """Places (k,) of the k largest of scores + bias (C,), largest first, the lowest place of equals first; False if not all
    are finite.

    First a threshold that at least k, and few more, pass; these are then ranked by counting the larger ones. What comes after
    `places` is room to work in; `ordered` is the memory of `sums` as int32, `one_bits` that of `one`.
    """
    size = len(scores)
    for c in range(size):
        sums[c] = scores[c] + bias[c]
    strange, high, low = np.int32(0), LEAST, LOW
    for c in range(size):
        v = ordered[c]
        strange = max(strange, np.int32(v & LOW))
        v = in_order(np.int32(0) if v == LEAST else v)  # -0.0 equals 0.0
        ordered[c] = v
        high, low = max(high, v), min(low, v)
    if strange >= NOT_FINITE:
        return False

    # Halve the range between the smallest and the largest number until few enough are above. Any threshold that k
    # numbers pass will do: that halving ends early costs time and no exactness.
    threshold = low
    one_bits[0] = in_order(low)
    bottom = np.float64(one[0])
    one_bits[0] = in_order(high)
    top = np.float64(one[0])
    for _ in range(HALVINGS if k < size else 0):
        middle = 0.5 * (bottom + top)
        one[0] = np.float32(middle)
        tried, passed = in_order(one_bits[0]), np.int32(0)
        for c in range(len(ordered)):
            passed += np.int32(ordered[c] >= tried)
        if passed < k:
            top = middle
            continue
        threshold, bottom = tried, middle
        if passed <= k + k // 2:
            break

    found = 0
    for c in range(size):
        keys[found] = (np.int64(ordered[c]) << 32) | (size - 1 - c)
        found += ordered[c] >= threshold
    whole = (found + LANES - 1) // LANES * LANES
    keys[found:whole] = LEAST_KEY
    for i in range(found):
        key, rank = keys[i], np.int64(0)
        for j in range(whole):
            rank += np.int64(keys[j] > key)
        if rank < k:
            places[rank] = size - 1 - np.int64(key & 0xFFFFFFFF)
    return True


@jit
def _inexact(x: float, y: float) -> bool:
    """Whether x + y loses something to rounding (Knuth's TwoSum)."""
    total = x + y
    shadow = total - x
    return ((x - (total - shadow)) + (y - shadow)) != 0


@jit
def _pairs(
    a: Array, b: Array, first: Array, second: Array, sub_keys: int, slots: Array, best: Array, at: Array, sums: Array
) -> bool:
    """The k best sums of two lists (k,) that fall; slots and best (k,). True if this may be wrong: rounded or not finite.

    For each i that was reached, `at[i]` is the best j not yet taken: the next best sum is the largest of theirs. Of equal
    sums that with the smaller place in the first list has the lower slot.
    """
    k = len(slots)
    sums[0], at[0], reached = a[0] + b[0], 0, 1
    unsure = _inexact(a[0], b[0])
    for rank in range(k):
        i = 0
        for other in range(1, reached):
            if sums[other] > sums[i] or (sums[other] == sums[i] and first[other] < first[i]):
                i = other
        j = at[i]
        slots[rank] = first[i] * sub_keys + second[j]
        best[rank] = np.float32(a[i]) + np.float32(b[j])
        unsure |= not np.isfinite(best[rank])
        if j == 0 and reached < k:
            sums[reached], at[reached] = a[reached] + b[0], 0
            unsure |= _inexact(a[reached], b[0])
            reached += 1
        at[i] = j + 1
        if j + 1 < k:
            sums[i] = a[i] + b[j + 1]
            unsure |= _inexact(a[i], b[j + 1])
        else:
            sums[i] = -np.inf
    return unsure


@jit
def select(
    scores: Array, bias: Array, head: int, start: int, stop: int, slots: Array, best: Array, unsure: Array
) -> None:
    """One head and the tokens from `start` to before `stop`.

    scores (H, 2, N, C) and the bias (H, 2, C) that is added to them, fp32 -> slots, best (N, H, k); in unsure (N, H) which may be wrong.
    Whole arrays, that compiled loops know what lies side by side.
    """
    sub_keys, k = scores.shape[3], slots.shape[2]
    # Made here, and not by a function for both: the loops are a fifth slower where the compiler has not seen these made.
    sums = np.empty((sub_keys + 2 * LANES - 1) // (2 * LANES) * 2 * LANES, np.float32)
    ordered = sums.view(np.int32)
    ordered[:] = LEAST
    keys, one = np.empty(sub_keys + LANES + 1, np.int64), np.empty(1, np.float32)
    one_bits = one.view(np.int32)
    first, second, at = np.empty(k, np.int64), np.empty(k, np.int64), np.empty(k, np.int64)
    a, b, next_sums = np.empty(k, np.float64), np.empty(k, np.float64), np.empty(k, np.float64)
    for n in range(start, stop):
        unsure[n, head] = True
        if not _largest(scores[head, 0, n], bias[head, 0], k, first, sums, ordered, keys, one, one_bits):
            continue
        if not _largest(scores[head, 1, n], bias[head, 1], k, second, sums, ordered, keys, one, one_bits):
            continue
        for i in range(k):
            a[i] = scores[head, 0, n, first[i]] + bias[head, 0, first[i]]
            b[i] = scores[head, 1, n, second[i]] + bias[head, 1, second[i]]
        unsure[n, head] = _pairs(a, b, first, second, sub_keys, slots[n, head], best[n, head], at, next_sums)


@jit
def group_rows(rows: Array, weights: Array, each: int, ends: Array, bags: Array, bag_weights: Array) -> None:
    """Sort reads by row, without comparing any: rows (M,), `each` of a token, weights (M,) -> bags (M,), the tokens of the
    first row's reads, then those of the second's, and so on, in the tokens' order; bag_weights (M,), their weights.

    ends (K,) is zero before; after, where each row's reads end. Rows below 0 are left out.
    """
    for row in rows:
        if row >= 0:
            ends[row] += 1
    _starts(ends)
    for read in range(len(rows)):
        row = rows[read]
        if row >= 0:
            place = ends[row]
            ends[row] = place + 1
            bags[place], bag_weights[place] = read // each, weights[read]


@jit
def _starts(counts: Array) -> None:
    """Counts -> the sum of those before, in place."""
    total = 0
    for i in range(len(counts)):
        count = counts[i]
        counts[i] = total
        total += count


@jit
def group_sub_keys(
    by_scores: Array,
    slots: Array,
    sub_keys: int,
    head: int,
    side: int,
    rows: Array,
    row_weights: Array,
    starts: Array,
    bags: Array,
    bag_weights: Array,
    by_bias: Array,
) -> None:
    """What both gradients of a search read, for one head and side: by_scores, slots (N, H, k) of the selection ->

    by query   the rows of H * 2 * C sub-keys: rows, row_weights (N, H, 2, k)
    by keys    the rows of N * H * 2 queries: those of each sub-key, one after another, in bags, bag_weights (H, 2, N * k),
               and where each begins among all, starts (H, 2, C), zero before
    by bias    its gradient: by_bias (H, 2, C), zero before
    """
    tokens, heads, k = slots.shape
    part = head * 2 + side
    ends, bag, weights = starts[head, side], bags[head, side], bag_weights[head, side]
    for n in range(tokens):
        for i in range(k):
            slot, g = slots[n, head, i], by_scores[n, head, i]
            c = slot % sub_keys if side else slot // sub_keys
            ends[c] += 1
            by_bias[head, side, c] += g
            rows[n, head, side, i], row_weights[n, head, side, i] = part * sub_keys + c, g
    _starts(ends)
    for n in range(tokens):
        for i in range(k):
            c = rows[n, head, side, i] - part * sub_keys
            place = ends[c]
            ends[c] = place + 1
            bag[place], weights[place] = (n * heads + head) * 2 + side, row_weights[n, head, side, i]
    # Each end is the next one's start.
    for c in range(sub_keys - 1, 0, -1):
        ends[c] = ends[c - 1] + part * tokens * k
    ends[0] = part * tokens * k


@jit_reordered
def dots(grad: Array, table: Array, indices: Array, start: int, stop: int, out: Array) -> None:
    """Products of the tokens' gradients with the rows that they read, from token `start` to before `stop`.

    grad (N, D), table (K, D), fp32; indices (N, J) -> out (N, J), 0 where an index is below 0. Four rows at a time.
    """
    reads = indices.shape[1]
    for n in range(start, stop):
        g = grad[n]
        for j in range(0, reads - reads % 4, 4):
            a, b = table[max(indices[n, j], 0)], table[max(indices[n, j + 1], 0)]
            c, d = table[max(indices[n, j + 2], 0)], table[max(indices[n, j + 3], 0)]
            by_a, by_b, by_c, by_d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(len(g)):
                by_a += g[i] * a[i]
                by_b += g[i] * b[i]
                by_c += g[i] * c[i]
                by_d += g[i] * d[i]
            out[n, j], out[n, j + 1], out[n, j + 2], out[n, j + 3] = by_a, by_b, by_c, by_d
        for j in range(reads - reads % 4, reads):
            a, by_a = table[max(indices[n, j], 0)], np.float32(0)
            for i in range(len(g)):
                by_a += g[i] * a[i]
            out[n, j] = by_a
        for j in range(reads):
            if indices[n, j] < 0:
                out[n, j] = 0


@jit_contracted
def adam(rows: Array, grad: Array, table: Array, mean: Array, square: Array, numbers: Array) -> None:
    """Lazy Adam on rows (U,) of table, mean and square (K, D) with grad (U, D), all fp32, in place.

    numbers    (8,) fp32, as `AdamStep.numbers` gives them

    Where the gradient, a moment or the number itself would not be finite, nothing moves.
    """
    lr, b1, one_b1, b2, one_b2, c1, c2, eps = numbers
    rate, correction = lr / c1, np.float32(1) / c2
    for u in range(len(rows)):
        x, m, v, gradient = table[rows[u]], mean[rows[u]], square[rows[u]], grad[u]
        for d in range(len(gradient)):
            g = gradient[d]
            new_m = m[d] * b1 + g * one_b1
            new_v = v[d] * b2 + g * g * one_b2
            new_x = x[d] - rate * new_m / (np.sqrt(new_v * correction) + eps)
            moves = (abs(new_m) < LARGEST) & (abs(new_v) < LARGEST) & (abs(new_x) < LARGEST)
            m[d] = new_m if moves else m[d]
            v[d] = new_v if moves else v[d]
            x[d] = new_x if moves else x[d]


@jit
def top(rows: Array, start: int, stop: int, places: Array, unsure: Array) -> None:
    """Places (R, k) of the k largest of rows (R, C) fp32, from row `start` to before `stop`; unsure (R,): of a row that is not finite."""
    size, k = rows.shape[1], places.shape[1]
    nothing = np.zeros(size, np.float32)
    sums = np.empty((size + 2 * LANES - 1) // (2 * LANES) * 2 * LANES, np.float32)
    ordered = sums.view(np.int32)
    ordered[:] = LEAST
    keys, one = np.empty(size + LANES + 1, np.int64), np.empty(1, np.float32)
    one_bits = one.view(np.int32)
    for row in range(start, stop):
        unsure[row] = not _largest(rows[row], nothing, k, places[row], sums, ordered, keys, one, one_bits)
