"""Output layer and cross-entropy in one, a chunk of tokens at a time: N x V logits never exist at once.

With 60,000 subwords and 16,384 tokens the logits and their gradient would take 8 GB in fp32; here it is `CHUNK_LOGITS` of
them on a GPU, and on a CPU as many as its caches hold.
Gradients are worked out beside the loss, so that no logit is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pkm.corpus.batches import IGNORE

CHUNK_LOGITS = 2**26  # 256 MiB in fp32
CHUNK_LOGITS_CPU = 2**22


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats, an fp32 scalar, summed over the targets that are not IGNORE.

    hidden (N, d), weight (V, d), bias (V,), targets (N,) int64. The products run in autocast's dtype; softmax, loss and
    the sum of the weight's gradient over chunks in fp32.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    # Asked here: within a Function's forward gradients are always off, and needs_input_grad knows nothing of no_grad.
    return _LinearCrossEntropy.apply(hidden.to(dtype), weight, bias, targets, torch.is_grad_enabled())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, trains: bool) -> Tensor:
        grads = [torch.empty_like(hidden), torch.zeros_like(weight), torch.zeros_like(bias)] if trains else []
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = weight.to(hidden.dtype)
            for h, t, rows in _chunks(hidden, targets, weight.shape[0]):
                logits = torch.mm(h, matrix.T).float().add_(bias)
                scored, picked = (t != IGNORE).unsqueeze(1), t.clamp(min=0).unsqueeze(1)
                normaliser = logits.logsumexp(1, keepdim=True)
                total += torch.where(scored, normaliser - logits.gather(1, picked), 0.0).sum()
                if trains:
                    # d nll / d logits = softmax - one-hot, on scored tokens
                    error = logits.sub_(normaliser).exp_().scatter_add_(1, picked, -torch.ones_like(normaliser))
                    error = error.mul_(scored)
                    grads[2] += error.sum(0)
                    error = error.to(h.dtype)
                    torch.mm(error, matrix, out=grads[0][rows])
                    grads[1] += torch.mm(error.T, h)
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        # `scale` has no dimensions: the products are taken in fp32, and stay in the gradients' dtypes.
        return hidden * scale, weight * scale, bias * scale, None, None


def _chunks(hidden: Tensor, targets: Tensor, vocab_size: int):  # type: ignore[no-untyped-def]
    size = max(1, (CHUNK_LOGITS_CPU if hidden.device.type == "cpu" else CHUNK_LOGITS) // vocab_size)
    for first in range(0, len(hidden), size):
        rows = slice(first, first + size)
        yield hidden[rows], targets[rows], rows
