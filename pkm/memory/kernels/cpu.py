"""The fast way through a memory in plain PyTorch, for CPUs (and any other device without kernels of its own).

Equal to `reference`, without its k x k sums, its N x J x D gathers and its N x H x 2 x C gradients: bytes decide the speed
of a memory, and torch's embedding bags read each row once, on all threads.

Shapes: N tokens, H heads, C sub-keys a side, k selected slots, J reads of a token, K rows of width D, U distinct rows read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from pkm.memory.kernels import reference
from pkm.memory.kernels.pairs import candidate_pairs

Array = npt.NDArray[Any]
SORTED_AT_ONCE = 1 << 16  # numbers that a thread sorts: as float64 its core's cache holds them
SORTED_WHOLE = 256  # a longer row is quicker to split first


def search(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """scores (H, 2, N, C), fp32 or fp64 -> slots (N, H, k) int32, weights (N, H, k)."""
    heads, _, tokens, sub_keys = scores.shape
    if scores.device.type != "cpu" or scores.dtype is torch.float64:
        found, best = reference.select_product(scores.permute(2, 0, 1, 3), k)
        return found.to(torch.int32), best.softmax(-1)
    slots, best = (torch.empty(tokens, heads, k, dtype=dtype) for dtype in (torch.int32, torch.float32))
    unsure = torch.empty(tokens, heads, dtype=torch.bool)
    all_scores, *outs = (t.numpy() for t in (scores, slots, best, unsure))
    pairs = np.array(candidate_pairs(k)).T

    def select(head: int, part: slice) -> None:
        _select(all_scores[head, :, part], pairs, *(out[part, head] for out in outs))

    at_once = max(1, SORTED_AT_ONCE // sub_keys)
    _in_threads(select, [(h, slice(n, n + at_once)) for h in range(heads) for n in range(0, tokens, at_once)])

    # Equals are sorted in either order, and rounded sums may hide which is larger: settle such rows the long way.
    if bool(unsure.any()):
        again, scores_again = reference.select_product(scores.permute(2, 0, 1, 3)[unsure].unsqueeze(1), k)
        slots[unsure], best[unsure] = again.squeeze(1).to(torch.int32), scores_again.squeeze(1)
    return slots, best.softmax(-1)


@np.errstate(invalid="ignore", over="ignore")
def _select(scores: Array, pairs: Array, slots: Array, best: Array, unsure: Array) -> None:
    """scores (2, n, C) of one head, pairs (2, P) -> slots, best (n, k), and in unsure (n,) which rows these may be wrong for."""
    k, sub_keys = slots.shape[1], scores.shape[2]
    (a, i), (b, j) = (_largest(side.astype(np.float64), min(k + 1, sub_keys)) for side in scores)
    sums = a.take(pairs[0], axis=1)
    sums += b.take(pairs[1], axis=1)
    total, place = _largest(sums, min(k + 1, sums.shape[1]))
    left, right = (side.take(place[:, :k]) for side in pairs)
    first, second = (np.take_along_axis(*args, 1).astype(np.float32) for args in ((a, left), (b, right)))
    best[:] = first + second
    slots[:] = np.take_along_axis(i, left, 1) * sub_keys + np.take_along_axis(j, right, 1)
    unsure[:] = ~(_falls(a) & _falls(b) & _falls(total) & np.isfinite(best).all(1))


def _largest(x: Array, count: int) -> tuple[Array, Array]:
    """The `count` largest of each row of x (n, W) float64, which is lost: numbers, largest first, and places (n, count).

    Numbers alone sort many times as fast as numbers with places, so each place is written into the last bits of its
    number, where a number of fp32 has none. A sum may lose some there: what still falls strictly fell strictly before.
    Equal ones come in either order, NaN and infinities first.
    """
    width = x.shape[1]
    last_bits = (1 << (width - 1).bit_length()) - 1
    bits = x.view(np.int64)
    bits &= ~last_bits
    bits |= np.arange(width)
    if width > SORTED_WHOLE:
        x.partition(width - count, axis=1)
        x = x[:, width - count :].copy()
    x.sort(axis=1)
    found = x[:, : -count - 1 : -1].copy()
    bits = found.view(np.int64)
    places = bits & last_bits
    bits &= ~last_bits
    return found, places


def _falls(x: Array) -> Array:
    """Which rows (n, W) are finite and fall strictly: (n,)."""
    good: Array = np.isfinite(x)
    good[:, 1:] &= x[:, 1:] < x[:, :-1]
    return np.logical_and.reduce(good, axis=1)


def _in_threads(run: Callable[..., None], jobs: list[tuple[Any, ...]]) -> None:
    """Run all jobs on as many threads as torch uses; NumPy uses one."""
    threads = min(torch.get_num_threads(), len(jobs))
    if threads < 2:
        for job in jobs:
            run(*job)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(run, *job) for job in jobs]:
            done.result()


def ties(values: Tensor) -> Tensor:
    """Which sorted lists (..., W) have equal neighbours or numbers that are not finite."""
    return ~((values[..., 1:] < values[..., :-1]).all(-1) & torch.isfinite(values).all(-1))


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
