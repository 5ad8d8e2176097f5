"""The fast way through a memory in plain PyTorch, for CPUs (and any other device without kernels of its own).

Where numba is installed, what plain PyTorch is slowest at is compiled (`compiled`), and selects the same. Equal to
`reference`, without its k x k sums, its N x J x D gathers and its N x H x 2 x C gradients: bytes decide the speed of a
memory, and torch's embedding bags read each row once, on all threads.

Shapes: N tokens, H heads, C sub-keys a side, k selected slots, J reads of a token, K rows of width D, U distinct rows read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import ModuleType
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
COUNTED_UP_TO = 8  # rows of a table for each read, up to which reads are sorted by counting those of every row
COMPILED_FROM = 1 << 18  # numbers to work on from which compiled code is worth being loaded


def search(scores: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """scores (H, 2, N, C) and the bias (H, 2, C) that is added to them, fp32 or fp64 -> slots (N, H, k) int32, weights (N, H, k)."""
    heads, _, tokens, sub_keys = scores.shape
    if scores.device.type != "cpu" or scores.dtype is torch.float64:
        found, best = reference.select_product((scores + bias.unsqueeze(2)).permute(2, 0, 1, 3), k)
        return found.to(torch.int32), best.softmax(-1)
    slots, best = (torch.empty(tokens, heads, k, dtype=dtype) for dtype in (torch.int32, torch.float32))
    unsure = torch.empty(tokens, heads, dtype=torch.bool)
    all_scores, biases, *outs = (t.numpy() for t in (scores.contiguous(), bias.contiguous(), slots, best, unsure))
    code = compiled(scores.numel())
    pairs = np.array(candidate_pairs(k)).T

    def select(head: int, part: slice) -> None:
        if code is not None:
            code.select(all_scores, biases, head, part.start, min(part.stop, tokens), *outs)
        else:
            _select(all_scores[head, :, part] + biases[head, :, None], pairs, *(out[part, head] for out in outs))

    at_once = max(1, SORTED_AT_ONCE // sub_keys)
    in_threads(select, [(h, slice(n, n + at_once)) for h in range(heads) for n in range(0, tokens, at_once)])

    # Equals are sorted in either order, and rounded sums may hide which is larger: settle such rows the long way.
    if bool(unsure.any()):
        sums = scores.permute(2, 0, 1, 3)[unsure] + bias.expand(tokens, -1, -1, -1)[unsure]
        again, scores_again = reference.select_product(sums.unsqueeze(1), k)
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


@cache
def _numba() -> ModuleType | None:
    try:
        from pkm.memory.kernels import compiled
    except ImportError:
        return None
    return compiled


def compiled(numbers: int) -> ModuleType | None:
    """The compiled loops, if numba is installed and so many numbers are worth its start."""
    return _numba() if numbers >= COMPILED_FROM else None


def in_threads(run: Callable[..., None], jobs: list[tuple[Any, ...]]) -> None:
    """Run all jobs on as many threads as torch uses; NumPy uses one."""
    threads = min(torch.get_num_threads(), len(jobs))
    if threads < 2:
        for job in jobs:
            run(*job)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(run, *job) for job in jobs]:
            done.result()


def top(values: Tensor, k: int) -> Tensor:
    """The same indices (..., k) int64 as `reference.top` of values (..., W), W at least k."""
    rows = values.reshape(-1, values.shape[-1])
    code = compiled(rows.numel()) if rows.device.type == "cpu" and rows.dtype is torch.float32 else None
    if code is None:
        best, places = rows.topk(min(k + 1, rows.shape[1]), dim=-1)
        places = places[:, :k].contiguous()
        # topk leaves the order of equals open.
        unsure = ~((best[:, 1:] < best[:, :-1]).all(-1) & torch.isfinite(best).all(-1))
    else:
        places, unsure = torch.empty(len(rows), k, dtype=torch.int64), torch.empty(len(rows), dtype=torch.bool)
        numbers, *outs = (t.numpy() for t in (rows.contiguous(), places, unsure))
        each = max(1, -(-len(rows) // torch.get_num_threads()))
        parts = [(first, min(first + each, len(rows))) for first in range(0, len(rows), each)]
        in_threads(code.top, [(numbers, *part, *outs) for part in parts])
    if bool(unsure.any()):
        places[unsure] = reference.top(rows[unsure], k)
    return places.view(*values.shape[:-1], k)


def search_backward(by_scores: Tensor, slots: Tensor, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query (N, H, q), keys (H, 2, C, q / 2), in their dtype, and bias (H, 2, C), of the selected scores alone.

    by_scores, slots (N, H, k): gradients of the scores of the selected slots, at least fp32, and which slots these are.
    By query it is a weighted read of sub-keys, by keys one of queries, sorted by sub-key; products of bf16 are, as in
    matrices, of numbers rounded to it, added up in fp32.
    """
    (tokens, heads, k), (_, _, sub_keys, half) = slots.shape, keys.shape
    queries, table = query.reshape(-1, half), keys.reshape(-1, half)
    code = compiled(slots.numel() * half) if _plain_fp32(by_scores, slots) else None
    if code is None:
        first = slots // sub_keys
        both = torch.stack([first, slots - first * sub_keys], dim=2)  # (N, H, 2, k)
        sides = torch.arange(0, len(table), sub_keys, dtype=slots.dtype, device=slots.device)
        rows, weights = both + sides.view(heads, 2, 1), by_scores.unsqueeze(2).expand(both.shape)
        rows, weights = rows.view(-1, k), weights.reshape(-1, k)
        read_rows, values = row_gradient(queries, rows, weights)
        by_keys = torch.zeros_like(table).index_copy_(0, read_rows, values.to(table.dtype))
        by_bias = weights.new_zeros(len(table)).index_add_(0, rows.flatten(), weights.flatten())
        by_query = read(table, rows, weights).to(query.dtype)
    else:
        rows, weights = torch.empty(tokens, heads, 2, k, dtype=torch.int32), torch.empty(tokens, heads, 2, k)
        bags, bag_weights = torch.empty(heads, 2, tokens * k, dtype=torch.int32), torch.empty(heads, 2, tokens * k)
        starts, by_bias = torch.zeros(heads, 2, sub_keys, dtype=torch.int32), torch.zeros(heads, 2, sub_keys)
        ins = [t.contiguous().numpy() for t in (by_scores, slots)]
        outs = [t.numpy() for t in (rows, weights, starts, bags, bag_weights, by_bias)]
        in_threads(code.group_sub_keys, [(*ins, sub_keys, h, side, *outs) for h in range(heads) for side in range(2)])
        by_keys = _read_bags(queries, bags.flatten(), starts.flatten(), bag_weights.flatten())
        every_k = torch.arange(0, rows.numel(), k, dtype=rows.dtype)
        by_query = _read_bags(table, rows.flatten(), every_k, weights.flatten())
    return by_query.view_as(query), by_keys.view_as(keys), by_bias.view(heads, 2, sub_keys)


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
    code = compiled(indices.numel() * table.shape[1]) if _plain_fp32(table, indices) else None
    if code is not None:
        out = torch.empty(indices.shape)
        ins = [t.detach().contiguous().numpy() for t in (grad.float(), table, indices)]
        each = -(-len(indices) // torch.get_num_threads())
        parts = [(first, min(first + each, len(indices))) for first in range(0, len(indices), each)]
        in_threads(code.dots, [(*ins, *part, out.numpy()) for part in parts])
        return out
    # These are the products of grad and table transposed, (N, K), that the reads pick out: J of every row.
    tokens, reads = indices.shape
    if reads > len(table):  # more than there are, so some twice: fewer products, and torch's sparse ones refuse them
        return (grad.to(table.dtype) @ table.t()).gather(1, indices.clamp(min=0).long()) * (indices >= 0)
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
    table_rows = int(flat.max()) + 1 if len(flat) else 0  # that can have been read
    code = compiled(len(flat) * grad.shape[1]) if _plain_fp32(weights, flat) and dtype is torch.float32 else None
    if code is not None and 0 < table_rows <= COUNTED_UP_TO * len(flat):
        bags, bag_weights = torch.empty_like(flat), torch.empty(len(flat))
        ends = torch.zeros(table_rows, dtype=flat.dtype)
        ins = [t.detach().contiguous().numpy() for t in (flat, weights.flatten())]
        code.group_rows(*ins, indices.shape[1], ends.numpy(), bags.numpy(), bag_weights.numpy())
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        rows = (ends > starts).nonzero().squeeze(1)
        reads = int(ends[-1])
        return rows, _read_bags(grad.to(dtype), bags[:reads], starts.index_select(0, rows), bag_weights[:reads])
    slots, order = torch.sort(flat, stable=True)
    skipped = int((flat < 0).sum())
    slots, order = slots[skipped:], order[skipped:]
    rows, counts = torch.unique_consecutive(slots, return_counts=True)
    per_read = weights.flatten().index_select(0, order).to(dtype)
    token = torch.arange(len(indices), device=order.device).repeat_interleave(indices.shape[1])
    return rows.long(), _read_bags(grad.to(dtype), token.index_select(0, order), counts.cumsum(0) - counts, per_read)


def _read_bags(table: Tensor, bags: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of the rows of table (K, D) that bags (M,) names, from each of starts (B,) to the next -> (B, D)."""
    return F.embedding_bag(bags, table, starts, mode="sum", per_sample_weights=weights.to(table.dtype))


def _plain_fp32(numbers: Tensor, indices: Tensor) -> bool:
    """Whether compiled loops take these."""
    return numbers.device.type == "cpu" and numbers.dtype is torch.float32 and indices.dtype is torch.int32


def _bags(indices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    if indices.numel() and int(indices.min()) < 0:
        return indices.clamp(min=0), weights * (indices >= 0)
    return indices, weights
