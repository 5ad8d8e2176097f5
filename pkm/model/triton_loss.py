"""Cross-entropy of a chunk of logits on a GPU in one kernel, which leaves their gradient where they were."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pkm.corpus.batches import IGNORE

BLOCK = 4096
"""Logits of a row at a time: 8 for each thread, 16 bytes of bf16."""
WARPS = 16
"""Two rows a processor, 32 MB of bf16 on an H100: when a row is read for the second time it is still in L2."""


def cross_entropy(
    logits: Tensor, bias: Tensor, targets: Tensor, gradients: bool, cap: float | None = None, z: float = 0.0
) -> Tensor:
    """Negative log-likelihoods in nats, (n,) fp32; 0 where a target is IGNORE.

    logits (n, W), any float but fp64, without their bias; bias (W,) fp32, -inf for columns that are no words; targets (n,) int64.
    With `gradients` the logits become d loss / d logits, softmax - one-hot, in place; `cap` and `z` are those of
    pkm.model.loss.linear_cross_entropy.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(logits.shape[1]))
    cross_entropy_kernel[(len(logits),)](
        logits,
        bias,
        targets,
        losses,
        logits.shape[1],
        cap or 1.0,
        z,
        IGNORE,
        block,
        cap is not None,
        gradients,
        num_warps=WARPS,
    )
    return losses


@triton.jit
def capped(x, cap):
    """cap * tanh(x / cap); no word stays none."""
    return tl.where(x == float("-inf"), x, cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0))


@triton.jit
def block_of_logits(logits, bias, at, W, cap, CAPPED: tl.constexpr, EVICTION: tl.constexpr):
    """With their bias, fp32, capped if they are to be; -inf beyond the row's end."""
    x = tl.load(logits + at, mask=at < W, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    x += tl.load(bias + at, mask=at < W, other=float("-inf"))
    if CAPPED:
        x = capped(x, cap)
    return x


@triton.jit
def cross_entropy_kernel(
    logits, bias, targets, losses, W, cap, z, IGNORE: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr,
    GRADIENTS: tl.constexpr,
):  # fmt: skip
    """A row a program; shapes as above. Reads a row from memory once, and once more from L2 to write the gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * W
    target = tl.load(targets + row)
    scored = target != IGNORE
    # Loaded before the sums below, for which all threads wait: no thread may have written its gradient here by then.
    picked = tl.load(logits + target, mask=scored, other=0.0).to(tl.float32)
    picked += tl.load(bias + target, mask=scored, other=0.0)
    if CAPPED:
        picked = capped(picked, cap)

    # Every lane has a largest logit of its own, and the sum of exp(logit - largest); they are joined at the end.
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, W, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = block_of_logits(logits, bias, at, W, cap, CAPPED, "evict_last")
        larger = tl.maximum(largest, x)
        # -inf less -inf is no number: nothing is added for no word, and nothing rescaled while there is none.
        before = tl.where(largest == larger, 1.0, tl.exp(largest - larger))
        total = total * before + tl.where(x == float("-inf"), 0.0, tl.exp(x - larger))
        largest = larger
    top = tl.max(largest, 0)
    total = tl.sum(tl.where(largest == float("-inf"), 0.0, total * tl.exp(largest - top)), 0)
    normaliser = top + tl.log(total)
    tl.store(losses + row, tl.where(scored, normaliser - picked, 0.0))

    if GRADIENTS:
        for start in range(0, W, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = block_of_logits(logits, bias, at, W, cap, CAPPED, "evict_first")
            error = tl.exp(x - normaliser) * (1.0 + 2.0 * z * normaliser) - tl.where(at == target, 1.0, 0.0)
            if CAPPED:
                error *= tl.where(x == float("-inf"), 0.0, 1.0 - (x / cap) * (x / cap))
            tl.store(logits + at, tl.where(scored, error, 0.0).to(logits.dtype.element_ty), mask=at < W)
