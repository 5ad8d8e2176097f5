"""Dropout whose random numbers cost little on a CPU, where torch's own take an eighth of a small model's step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = (
    1 << 16
)  # a random number has 16 bits: the rate is right to 1 / 131,072, and the scale is that of the rate it has


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """x with each number 0 with probability `rate`, and the others divided by 1 - `rate`; x itself unless training.

    On a CPU the mask depends on one number from torch's generator, which is seeded anew in every step, so that a resumed
    run draws the same; four numbers of the mask come from each of NumPy's, in place of one from two of torch's.
    """
    if not training or rate == 0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, rate, training=True)
    seed = torch.randint(0, 2**63 - 1, (), dtype=torch.int64)
    return _drop(x, seed, rate)


def kept_and_scale(rate: float) -> tuple[int, float]:
    """Of `LEVELS` random numbers, how many keep what they stand for, and what that is multiplied with."""
    kept = LEVELS - min(round(rate * LEVELS), LEVELS - 1)
    return kept, LEVELS / kept


@torch.library.custom_op("pkm::drop", mutates_args=())
def _drop(x: Tensor, seed: Tensor, rate: float) -> Tensor:
    """x (...), seed () int64 on the CPU -> the same shape and dtype; a function of what it is given."""
    kept, scale = kept_and_scale(rate)
    numbers = np.random.SFC64(int(seed)).random_raw(-(-x.numel() // 4)).view(np.uint16)[: x.numel()]
    # As bytes: torch turns these into numbers ten times as fast as it does bool.
    keeps = (numbers <= kept - 1).view(np.uint8)
    return torch.from_numpy(keeps).to(x.dtype).view(x.shape).mul_(x).mul_(scale)


@_drop.register_fake
def _(x: Tensor, seed: Tensor, rate: float) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, ctx.rate = inputs
    ctx.save_for_backward(seed)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    # The mask is made again: that takes no longer than to keep it, and no memory.
    (seed,) = ctx.saved_tensors
    return _drop(grad, seed, ctx.rate), None, None


_drop.register_autograd(_backward, setup_context=_save)
