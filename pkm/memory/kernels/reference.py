"""What a memory computes, in plain PyTorch: the definition of correct for every other kernel.

Shapes: N tokens, H heads, K slots, C sub-keys a side, k selected slots, q query size, d model width, J = H * k reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

READ_BYTES = 1 << 26  # most that a read may gather at once


def top(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest along the last dimension, largest first; the lowest index wins a tie, NaN counts as largest."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :k]


def select_product(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sub-key scores (N, H, 2, C) -> slots (N, H, k) int64, their scores (N, H, k), best first (paper 3.1).

    Slot i * C + j has the score scores[0, i] + scores[1, j]. Selection is exact for these sums as real numbers, before
    rounding, and the lowest slot wins a tie.
    """
    with torch.no_grad():
        first, second = top(scores, k).unbind(2)
    return select_among(scores, first, second)


def select_among(scores: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """`select_product` when the k best sub-keys of each side (N, H, k) are known."""
    sub_keys, k = scores.shape[-1], first.shape[-1]
    with torch.no_grad():
        a = scores[:, :, 0].gather(-1, first).unsqueeze(-1)
        b = scores[:, :, 1].gather(-1, second).unsqueeze(-2)
        slots = (first.unsqueeze(-1) * sub_keys + second.unsqueeze(-2)).flatten(-2)
        rounded, lost = (t.flatten(-2) for t in exact_sum(a, b))
        # Stable sorts from the last criterion to the first: slot, what rounding lost, sum.
        order = slots.argsort(-1)
        order = order.gather(-1, top(lost.gather(-1, order), k * k))
        order = order.gather(-1, top(rounded.gather(-1, order), k))
        slots = slots.gather(-1, order)
    best = scores[:, :, 0].gather(-1, slots // sub_keys) + scores[:, :, 1].gather(-1, slots % sub_keys)
    return slots, best


def exact_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b as rounded sum and the part that rounding lost (Knuth's TwoSum): together exact, 0 where not finite."""
    total = a + b
    shadow = total - a
    lost = (a - (total - shadow)) + (b - shadow)
    return total, torch.where(torch.isfinite(lost), lost, 0.0)


def select_flat(query: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """query (N, H, q), keys (H, K, q) -> slots (N, H, k) int64, their scores (N, H, k), best first (paper 3.1, eq. 1)."""
    with torch.no_grad():
        rows = max(1, READ_BYTES // (keys.shape[0] * keys.shape[1] * 8))
        slots = torch.cat([top(torch.einsum("nhq,hkq->nhk", part, keys), k) for part in query.split(rows)])
    heads = torch.arange(keys.shape[0], device=keys.device).view(-1, 1)
    return slots, torch.einsum("nhq,nhkq->nhk", query, keys[heads, slots])


def read(table: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Rows of table (K, d) summed with weights: indices, weights (N, J) -> (N, d), at least fp32. Indices below 0 add nothing."""
    parts = [_gathered(table, i, w) for i, w in _pieces(table, indices, weights)]
    return torch.cat([torch.einsum("nj,njd->nd", w, rows) for rows, w in parts])


def weight_gradient(grad: Tensor, table: Tensor, indices: Tensor) -> Tensor:
    """Gradient of `read` by its weights: grad (N, d) -> (N, J), at least fp32."""
    pieces = zip(
        _pieces(table, indices, torch.ones_like(indices, dtype=grad.dtype)), _split(grad, table, indices), strict=True
    )
    dots = []
    for (i, ones), g in pieces:
        rows, counts = _gathered(table, i, ones)
        dots.append(torch.einsum("nd,njd->nj", g.to(rows.dtype), rows) * counts)
    return torch.cat(dots)


def row_gradient(grad: Tensor, indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of `read` by the rows it read: grad (N, d) -> rows (U,) int64 ascending, values (U, d), at least fp32."""
    token, _ = torch.nonzero(indices >= 0, as_tuple=True)
    rows, place = torch.unique(indices[indices >= 0], return_inverse=True)
    values = torch.zeros(len(rows), grad.shape[1], dtype=at_least_fp32(grad.dtype), device=grad.device)
    entries = weights[indices >= 0].to(values.dtype)
    step = max(1, READ_BYTES // (4 * grad.shape[1]))
    for p, t, w in zip(place.split(step), token.split(step), entries.split(step), strict=True):
        values.index_add_(0, p, grad[t].to(values.dtype) * w.unsqueeze(1))
    return rows.long(), values


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _split(t: Tensor, table: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    return t.split(max(1, READ_BYTES // (4 * indices.shape[1] * table.shape[1])))


def _pieces(table: Tensor, indices: Tensor, weights: Tensor):  # type: ignore[no-untyped-def]
    return zip(_split(indices, table, indices), _split(weights, table, indices), strict=True)


def _gathered(table: Tensor, indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    dtype = at_least_fp32(table.dtype)
    return table[indices.clamp(min=0)].to(dtype), weights.to(dtype) * (indices >= 0)
