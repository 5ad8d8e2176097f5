"""Product-key search as one torch operator: queries -> slots and weights, with the way back that makes no N x H x 2 x C zeros.

Shapes: N tokens, H heads, q query size, C sub-keys a side, k selected slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pkm.memory.kernels import cpu

SCORE_BYTES = 1 << 22  # sub-key scores that are kept at a time, forward on a CPU: they stay in its caches
LEAST_TOKENS = 1024  # on a GPU: fewer would leave a part of it idle
GRADIENT_BYTES = 1 << 26  # their gradients, backward on a GPU


@torch.library.custom_op("pkm::search", mutates_args=())
def search(query: Tensor, keys: Tensor, bias: Tensor, k: int, kernels: str) -> tuple[Tensor, Tensor]:
    """The k best slots of each token and head and the softmax over their scores; exact, the lowest slot wins a tie.

    query    (N, H, q), and keys (H, 2, C, q / 2) in the same dtype: they are multiplied in it, sums in fp32 at least
    bias     (H, 2, C): added to the scores of the sub-keys
    kernels  "triton" or "torch"
    -> slots (N, H, k) int32, weights (N, H, k), at least fp32. Differentiable by query, keys and bias.
    """
    tokens, heads, _ = query.shape
    sub_keys = keys.shape[2]
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    bias = bias.to(dtype).contiguous()
    slots = torch.empty(tokens, heads, k, dtype=torch.int32, device=query.device)
    weights = torch.empty(tokens, heads, k, dtype=dtype, device=query.device)
    at_once = tokens_at_once(heads * 2 * sub_keys * 4, query.device)
    for first in range(0, tokens, at_once):
        part = slice(first, first + at_once)
        scores = sub_key_scores(query[part], keys)
        if kernels == "triton":
            from pkm.memory.kernels import triton_search

            triton_search.search_into(scores, bias, slots[part], weights[part])
        else:
            slots[part], weights[part] = cpu.search(scores, bias, k)
    return slots, weights


def tokens_at_once(score_bytes: int, device: torch.device) -> int:
    """Tokens whose scores, so many bytes each, exist together: on a GPU as many as stay in L2 until they are read."""
    if device.type != "cuda":
        return max(1, SCORE_BYTES // score_bytes)
    return max(LEAST_TOKENS, torch.cuda.get_device_properties(device).L2_cache_size * 2 // 3 // score_bytes)


@search.register_fake
def _(query: Tensor, keys: Tensor, bias: Tensor, k: int, kernels: str) -> tuple[Tensor, Tensor]:
    shape = (query.shape[0], query.shape[1], k)
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    return query.new_empty(shape, dtype=torch.int32), query.new_empty(shape, dtype=dtype)


@torch.library.custom_op("pkm::search_backward", mutates_args=())
def search_backward(
    grad: Tensor, slots: Tensor, weights: Tensor, query: Tensor, keys: Tensor, kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `search` by query, keys (in their dtypes) and bias (in that of the weights); grad (N, H, k).

    On a GPU the gradient of the scores is made for some tokens at a time, in one buffer; elsewhere there is none, only the
    selected sub-keys' rows are added up.
    """
    if kernels != "triton":
        by_scores = weights * (grad - (weights * grad).sum(-1, keepdim=True))
        return cpu.search_backward(by_scores, slots, query, keys)
    from pkm.memory.kernels.triton_search import score_gradient

    tokens, heads, _ = slots.shape
    _, _, sub_keys, half = keys.shape
    at_once = max(1, min(tokens, GRADIENT_BYTES // (heads * 2 * sub_keys * query.element_size())))
    buffer = torch.empty(at_once, heads, 2, sub_keys, dtype=query.dtype, device=query.device)
    query = query.contiguous()
    keys_per_side = keys.reshape(heads * 2, sub_keys, half)
    by_query = torch.empty_like(query)
    by_keys = torch.zeros(heads * 2, sub_keys, half, dtype=weights.dtype, device=keys.device)
    by_bias = torch.zeros(heads * 2, 1, sub_keys, dtype=weights.dtype, device=keys.device)
    grad, ones = grad.contiguous(), torch.ones(1, 1, 1, dtype=query.dtype, device=query.device)
    for first in range(0, tokens, at_once):
        part = slice(first, first + at_once)
        n = min(at_once, tokens - first)
        by_scores = buffer[:n]
        score_gradient(grad[part], weights[part], slots[part], by_scores)
        per_side = by_scores.view(n, heads * 2, sub_keys).transpose(0, 1)  # (2H, N, C)
        queries = query[part].view(n, heads * 2, half).transpose(0, 1)  # (2H, N, q / 2)
        torch.bmm(per_side, keys_per_side, out=by_query[part].view(n, heads * 2, half).transpose(0, 1))
        by_keys += product(per_side.transpose(1, 2), queries)
        by_bias += product(ones.expand(heads * 2, 1, n), per_side)
    return by_query, by_keys.view_as(keys).to(keys.dtype), by_bias.view(heads, 2, sub_keys)


@search_backward.register_fake
def _(
    grad: Tensor, slots: Tensor, weights: Tensor, query: Tensor, keys: Tensor, kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(keys), weights.new_empty(keys.shape[:3])


def sub_key_scores(query: Tensor, keys: Tensor) -> Tensor:
    """query (N, H, q), keys (H, 2, C, q / 2) -> (H, 2, N, C), at least fp32."""
    heads, _, sub_keys, half = keys.shape
    halves = query.reshape(-1, heads * 2, half).transpose(0, 1)
    columns = keys.reshape(heads * 2, sub_keys, half).transpose(1, 2)
    return product(halves, columns).view(heads, 2, -1, sub_keys)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product with sums and result in fp32 at least, whatever the dtype of a and b."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b)
    if a.device.type == "cuda":
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, keys, _, _, ctx.kernels = inputs
    slots, weights = output
    ctx.mark_non_differentiable(slots)
    ctx.save_for_backward(slots, weights, query, keys)


def _backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    slots, weights, query, keys = ctx.saved_tensors
    return *search_backward(grad, slots, weights, query, keys, ctx.kernels), None, None


search.register_autograd(_backward, setup_context=_save)
