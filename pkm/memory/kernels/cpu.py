"""The fast way through a memory in plain PyTorch, for CPUs (and any other device without kernels of its own).

Equal to `reference`, without its k x k sums, its N x J x D gathers and its N x H x 2 x C gradients: bytes decide the speed
of a memory, and torch's embedding bags read each row once, on all threads.

Shapes: N tokens, H heads, C sub-keys a side, k selected slots, J reads of a token, K rows of width D, U distinct rows read.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from pkm.memory.kernels import reference
from pkm.memory.kernels.pairs import candidate_pairs


def search(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """scores (H, 2, N, C), fp32 or fp64 -> slots (N, H, k) int32, weights (N, H, k)."""
    sub_keys = scores.shape[-1]
    values, found = scores.topk(min(k + 1, sub_keys), dim=-1)
    left, right = _pairs(k, scores.device)
    total = values[:, 0].index_select(-1, left) + values[:, 1].index_select(-1, right)  # (H, N, P)
    best, place = total.topk(min(k + 1, len(left)), dim=-1)
    unsure = ties(values).any(1) | ties(best)
    best, place = best[..., :k], place[..., :k]
    i, j = (side.index_select(0, place.flatten()).view_as(place) for side in (left, right))
    slots = found[:, 0].gather(-1, i) * sub_keys + found[:, 1].gather(-1, j)

    # topk leaves the order of equals open, and rounded sums may hide which is larger: settle such rows the long way.
    if bool(unsure.any()):
        rows = scores.transpose(1, 2)[unsure].unsqueeze(1)
        again, scores_again = reference.select_product(rows, k)
        slots[unsure], best[unsure] = again.squeeze(1), scores_again.squeeze(1)
    return slots.transpose(0, 1).to(torch.int32), best.transpose(0, 1).softmax(-1)


def ties(values: Tensor) -> Tensor:
    """Which sorted lists (..., W) have equal neighbours or numbers that are not finite."""
    return ~((values[..., 1:] < values[..., :-1]).all(-1) & torch.isfinite(values).all(-1))


def _pairs(k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    pairs = torch.tensor(candidate_pairs(k), device=device)
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()


def score_gradient(grad_weights: Tensor, weights: Tensor, slots: Tensor, out: Tensor, clear: bool) -> None:
    """Gradient of the sub-key scores into out (N, H, 2, C), which is zero elsewhere; `clear` writes the zeros back."""
    if clear:
        out.zero_()
        return
    grad = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))
    sub_keys = out.shape[-1]
    first = slots // sub_keys
    both = torch.stack([first, slots - first * sub_keys], dim=2).long()
    out.scatter_add_(-1, both, grad.unsqueeze(2).expand_as(both).to(out.dtype))


def read(table: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Rows of table (K, D) summed with weights: indices, weights (N, J) -> (N, D), at least fp32; indices below 0 add nothing."""
    if table.dtype not in (torch.float32, torch.float64):
        return reference.read(table, indices, weights)
    bags, per_read = _bags(indices, weights.to(table.dtype))
    return F.embedding_bag(bags, table, mode="sum", per_sample_weights=per_read)


def weight_gradient(grad: Tensor, table: Tensor, indices: Tensor) -> Tensor:
    """Gradient of `read` by its weights: grad (N, D) -> (N, J), at least fp32."""
    if table.dtype not in (torch.float32, torch.float64):
        return reference.weight_gradient(grad, table, indices)
    # These are the products of grad and table transposed, (N, K), that the reads pick out: J of every row.
    tokens, reads = indices.shape
    starts = torch.arange(0, tokens * reads + 1, reads, device=table.device)
    columns = indices.clamp(min=0).flatten().long()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR")
        picked = torch.sparse_csr_tensor(
            starts, columns, table.new_zeros(tokens * reads), size=(tokens, len(table)), check_invariants=False
        )
    dots = torch.sparse.sampled_addmm(picked, grad.to(table.dtype), table.t(), beta=0.0).values()
    return dots.view(tokens, reads) * (indices >= 0)


def row_gradient(grad: Tensor, indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of `read` by the rows it read: grad (N, D) -> rows (U,) int64 ascending, values (U, D), at least fp32.

    Sorted by row, the gradient of a row is itself a weighted read, of `grad`.
    """
    dtype = reference.at_least_fp32(grad.dtype)
    flat = indices.flatten()
    slots, order = torch.sort(flat, stable=True)
    skipped = int((flat < 0).sum())
    slots, order = slots[skipped:], order[skipped:]
    rows, counts = torch.unique_consecutive(slots, return_counts=True)
    offsets = counts.cumsum(0) - counts
    per_read = weights.flatten().index_select(0, order).to(dtype)
    token = torch.arange(len(indices), device=order.device).repeat_interleave(indices.shape[1])
    values = F.embedding_bag(
        token.index_select(0, order), grad.to(dtype), offsets, mode="sum", per_sample_weights=per_read
    )
    return rows.long(), values


def _bags(indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    if indices.numel() and int(indices.min()) < 0:
        return indices.clamp(min=0), weights * (indices >= 0)
    return indices, weights
