"""Output layer and cross-entropy in one, a chunk of tokens at a time: N x V logits never exist at once.

With 60,000 subwords and 16,384 tokens the logits and their gradient would take 8 GB in fp32; here it is `CHUNK_LOGITS` of
them on a GPU, and on a CPU as many as its caches hold. Gradients are worked out beside the loss, so that no logit is
computed twice.

On a GPU with Triton, and on a CPU with numba, a chunk's logits are written by their product, read and overwritten with their
gradient by one kernel, and read by two more products, all in autocast's dtype. Rows of the weight are added there, in the copy
that is made for the products anyway, until V is a multiple of 64: tensor cores are fed at full speed only by rows that are aligned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pkm.corpus.batches import IGNORE
from pkm.memory.kernels.backend import TRITON
from pkm.memory.kernels.cpu import compiled

CHUNK_LOGITS = 2**28  # 512 MiB in bf16
CHUNK_LOGITS_CPU = 2**22
ALIGNED = 64


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None = None, z: float = 0.0
) -> Tensor:
    """Negative log-likelihood in nats, an fp32 scalar, summed over the targets that are not IGNORE.

    hidden (N, d), weight (V, d), bias (V,), targets (N,) int64. Logits l are cap * tanh(l / cap) if there is a cap. The
    gradient, not what is returned, is that of the sum and z times the squared logarithms of the softmax's denominators
    besides (z-loss: Chowdhery et al., 2022): losses compare, whatever z. The products run in autocast's dtype; softmax and loss in
    fp32, and so does the sum of the weight's gradient over chunks; a CPU rounds a chunk's part of it to the dtype first.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    # Asked here: within a Function's forward gradients are always off, and needs_input_grad knows nothing of no_grad.
    if bias is None:
        bias = weight.new_zeros(len(weight))
    return _LinearCrossEntropy.apply(hidden.to(dtype), weight, bias, targets, cap, z, torch.is_grad_enabled())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        cap: float | None,
        z: float,
        trains: bool,
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            kernel = _kernel(hidden, len(hidden) * len(weight), cap)
            compute = partial(_fused, kernel) if kernel else _plain
            total, *grads = compute(hidden, weight, bias, targets, cap, z, trains)
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        # `scale` has no dimensions: the products are taken in fp32, and stay in the gradients' dtypes.
        return hidden * scale, weight * scale, bias * scale, None, None, None, None


def _kernel(hidden: Tensor, logits: int, cap: float | None) -> Callable[..., Tensor] | None:
    """What does all that is between the products, if there is something for this device. That for CPUs knows no cap and
    no half precision but bf16, and is not worth being loaded for few logits."""
    if hidden.is_cuda and TRITON and hidden.dtype is not torch.float64:
        from pkm.model import triton_loss

        return triton_loss.cross_entropy
    known = hidden.device.type == "cpu" and hidden.dtype in (torch.float32, torch.bfloat16) and cap is None
    if known and compiled(logits) is not None:
        from pkm.model import compiled_loss

        return compiled_loss.cross_entropy
    return None


def _plain(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, cap: float | None, z: float, trains: bool
) -> list[Tensor]:
    """The loss; with `trains` also the gradients of hidden, weight and bias."""
    grads = [torch.empty_like(hidden), torch.zeros_like(weight), torch.zeros_like(bias)] if trains else []
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    matrix = weight.to(hidden.dtype)
    for rows in _chunks(len(hidden), weight.shape[0], hidden.device):
        h, t = hidden[rows], targets[rows]
        logits = torch.mm(h, matrix.T).float().add_(bias)
        if cap is not None:
            logits.div_(cap).tanh_().mul_(cap)
        scored, picked = (t != IGNORE).unsqueeze(1), t.clamp(min=0).unsqueeze(1)
        normaliser = logits.logsumexp(1, keepdim=True)
        total += torch.where(scored, normaliser - logits.gather(1, picked), 0.0).sum()
        if trains:
            # d nll / d logits = softmax - one-hot, on scored tokens; d z log^2 / d logits = 2 z log softmax
            slope = None if cap is None else 1 - (logits / cap).square_()
            error = logits.sub_(normaliser).exp_()
            if z:
                error.mul_(1 + 2 * z * normaliser)
            error = error.scatter_add_(1, picked, -torch.ones_like(normaliser)).mul_(scored)
            if slope is not None:
                error.mul_(slope)
            grads[2] += error.sum(0)
            error = error.to(h.dtype)
            torch.mm(error, matrix, out=grads[0][rows])
            _add_product(grads[1], error.T, h)
    return [total, *grads]


def _fused(
    cross_entropy: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    cap: float | None,
    z: float,
    trains: bool,
) -> list[Tensor]:
    """The same with one kernel for all that is between the products."""
    (vocab_size, dim), tokens = weight.shape, len(hidden)
    width = _aligned(vocab_size, ALIGNED)
    matrix = torch.empty(width, dim, dtype=hidden.dtype, device=weight.device)
    matrix[:vocab_size], matrix[vocab_size:] = weight, 0
    no_words = F.pad(bias.float(), (0, width - vocab_size), value=-torch.inf)
    losses = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
    if trains:
        by_hidden = torch.empty_like(hidden)
        # A column of ones gives the bias's gradient beside the weight's, without one more pass over that of the logits.
        with_one = F.pad(hidden, (0, _aligned(dim + 1, 8) - dim))
        with_one[:, dim] = 1
        by_weight = torch.zeros(width, with_one.shape[1], dtype=torch.float32, device=hidden.device)
    for rows in _chunks(tokens, width, hidden.device):
        logits = torch.mm(hidden[rows], matrix.T)
        losses[rows] = cross_entropy(logits, no_words, targets[rows], trains, cap, z)
        if trains:
            torch.mm(logits, matrix, out=by_hidden[rows])
            _add_product(by_weight, logits.T, with_one[rows])
    if not trains:
        return [losses.sum()]
    by_weight = by_weight[:vocab_size].to(weight.dtype)
    return [losses.sum(), by_hidden, by_weight[:, :dim], by_weight[:, dim].to(bias.dtype)]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, total in fp32 where a and b are in half of it."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # CPU products of half precision have no other result
        total += torch.mm(a, b)


def _chunks(tokens: int, width: int, device: torch.device) -> Iterator[slice]:
    """Tokens whose logits exist together: on a GPU a multiple of 64 of them, and about as many in every chunk."""
    if device.type == "cpu":
        size = max(1, CHUNK_LOGITS_CPU // width)
    else:
        most = max(ALIGNED, CHUNK_LOGITS // width // ALIGNED * ALIGNED)
        chunks = max(1, -(-tokens // most))
        size = max(ALIGNED, _aligned(-(-tokens // chunks), ALIGNED))
    for first in range(0, tokens, size):
        yield slice(first, first + size)


def _aligned(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
