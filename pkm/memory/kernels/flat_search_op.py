"""Search over flat keys as one torch operator: queries -> slots and weights.

Shapes: N tokens, H heads, K slots, q query size, k selected slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pkm.memory.kernels import cpu, reference
from pkm.memory.kernels.search_op import product

SCORE_BYTES = 1 << 28  # scores that are kept at a time


@torch.library.custom_op("pkm::search_flat", mutates_args=())
def search_flat(query: Tensor, keys: Tensor, bias: Tensor, k: int, kernels: str) -> tuple[Tensor, Tensor]:
    """The k best slots of each token and head and the softmax over their scores; the lowest slot wins a tie.

    query    (N, H, q), and keys (H, K, q) in the same dtype; bias (H, K), added to the scores
    -> slots (N, H, k) int32, weights (N, H, k), at least fp32. Differentiable by query, keys and bias.
    """
    tokens, heads, _ = query.shape
    slots = keys.shape[1]
    dtype = reference.at_least_fp32(query.dtype)
    found = torch.empty(tokens, heads, k, dtype=torch.int32, device=query.device)
    weights = torch.empty(tokens, heads, k, dtype=dtype, device=query.device)
    at_once = max(1, SCORE_BYTES // (heads * slots * 4))
    for first in range(0, tokens, at_once):
        part = slice(first, first + at_once)
        scores = product(query[part].transpose(0, 1), keys.transpose(1, 2)) + bias.to(dtype).unsqueeze(1)  # (H, n, K)
        index = cpu.top(scores, k)
        found[part], weights[part] = index.transpose(0, 1), scores.gather(-1, index).softmax(-1).transpose(0, 1)
    return found, weights


@search_flat.register_fake
def _(query: Tensor, keys: Tensor, bias: Tensor, k: int, kernels: str) -> tuple[Tensor, Tensor]:
    shape = (query.shape[0], query.shape[1], k)
    return query.new_empty(shape, dtype=torch.int32), query.new_empty(shape, dtype=reference.at_least_fp32(query.dtype))


@torch.library.custom_op("pkm::search_flat_backward", mutates_args=())
def search_flat_backward(
    grad: Tensor, found: Tensor, weights: Tensor, query: Tensor, keys: Tensor, kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `search_flat` by query, keys (in their dtypes) and bias; grad (N, H, k).

    By query it is a weighted read of keys, by keys the gradient of rows of such a read: both exist already.
    """
    tokens, heads, k = found.shape
    _, slots, size = keys.shape
    by_scores = weights * (grad - (weights * grad).sum(-1, keepdim=True))
    first = torch.arange(heads, device=found.device).view(1, heads, 1) * slots
    rows, by_scores = (found.long() + first).view(tokens * heads, k), by_scores.view(tokens * heads, k)
    table, queries = keys.reshape(heads * slots, size), query.reshape(tokens * heads, size)
    by_keys = torch.zeros_like(table)
    by_bias = torch.zeros(heads * slots, 1, dtype=weights.dtype, device=table.device)
    ones = torch.ones(tokens * heads, 1, dtype=weights.dtype, device=table.device)
    if kernels == "triton":
        from pkm.memory.kernels import triton_read, triton_rows

        by_query = triton_read.read(table, rows, by_scores, query.dtype)
        plan = triton_rows.plan(rows)
        triton_rows.backward(plan, queries, table, by_scores, out=by_keys, dots=False)
        triton_rows.backward(plan, ones, by_bias, by_scores, out=by_bias, dots=False)
    else:
        by_query = cpu.read(table, rows, by_scores).to(query.dtype)
        for gradient, of in ((by_keys, queries), (by_bias, ones)):
            read, values = cpu.row_gradient(of, rows, by_scores)
            gradient.index_copy_(0, read, values.to(gradient.dtype))
    return by_query.view_as(query), by_keys.view_as(keys), by_bias.view(heads, slots)


@search_flat_backward.register_fake
def _(
    grad: Tensor, found: Tensor, weights: Tensor, query: Tensor, keys: Tensor, kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(keys), weights.new_empty(keys.shape[:2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, keys, _, _, ctx.kernels = inputs
    found, weights = output
    ctx.mark_non_differentiable(found)
    ctx.save_for_backward(found, weights, query, keys)


def _backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    found, weights, query, keys = ctx.saved_tensors
    return *search_flat_backward(grad, found, weights, query, keys, ctx.kernels), None, None


search_flat.register_autograd(_backward, setup_context=_save)
