"""Cross-entropy's Triton kernel against float64: on a GPU where there is one, else in Triton's interpreter.

Not collected by itself: tests/model/test_loss.py runs it in a process of its own, and `scripts/gpu_check.sh` on a GPU, where
sizes are real ones besides.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pkm.corpus.batches import IGNORE
from pkm.model import loss
from pkm.model.triton_loss import cross_entropy

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def in_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(20190712)
    monkeypatch.setattr(loss, "_kernel", lambda *of: cross_entropy)


def near(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    """Relative error in the Euclidean norm; NaN never passes."""
    return bool((ours.double() - theirs.double()).norm() <= tolerance * theirs.double().norm() + 1e-9)


def inputs(tokens: int, dim: int, words: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Hidden states, weight and bias, of which the first two are exact in `dtype`, and targets, some ignored."""
    hidden, weight = (torch.randn(n, dim, device=DEVICE).to(dtype).float() for n in (tokens, words))
    bias = torch.randn(words, device=DEVICE)
    targets = torch.randint(0, words, (tokens,), device=DEVICE)
    targets[::5] = IGNORE
    return [t.requires_grad_() for t in (hidden, weight, bias)], targets


# Tokens, d, words, logits in a chunk: one chunk; several, the last shorter; a token a chunk; V a multiple of 64; real sizes.
SHAPES = [(13, 5, 11, 2**20), (13, 8, 70, 3 * 128), (3, 4, 100, 1), (6, 16, 128, 2**20)]
SHAPES += [(4096, 1024, 60_014, 2**26), (1000, 512, 60_014, 2**28)] if GPU else []


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_are_those_of_float64(
    shape: tuple[int, int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, dim, words, chunk = shape
    monkeypatch.setattr(loss, "CHUNK_LOGITS_CPU", chunk)
    monkeypatch.setattr(loss, "CHUNK_LOGITS", chunk)
    tensors, targets = inputs(tokens, dim, words, dtype)
    with torch.autocast(DEVICE.type, dtype=dtype, enabled=dtype is not torch.float32):
        nll = loss.linear_cross_entropy(*tensors, targets)
        again = loss.linear_cross_entropy(*tensors, targets)
        with torch.no_grad():
            alone = loss.linear_cross_entropy(*tensors, targets)
    found = torch.autograd.grad(nll * 0.25, tensors)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    wanted = F.cross_entropy(F.linear(*exact), targets, reduction="sum", ignore_index=IGNORE)
    assert nll.dtype == torch.float32 and near(nll, wanted, TOLERANCES[dtype] / 2)
    assert torch.equal(alone, nll)
    for one, same, theirs in zip(
        found, torch.autograd.grad(again * 0.25, tensors), torch.autograd.grad(wanted * 0.25, exact), strict=True
    ):
        assert near(one, theirs, TOLERANCES[dtype])
        assert torch.equal(one, same), "two runs differ"


@pytest.mark.parametrize("cap, z", [(1.5, 0.0), (None, 0.3), (1.5, 0.3)])
def test_capped_logits_and_z_loss_are_those_of_the_plain_way(
    cap: float | None, z: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, targets = inputs(13, 5, 70, torch.float32)
    found = []
    for kernel in (cross_entropy, None):
        monkeypatch.setattr(loss, "_kernel", lambda *of, kernel=kernel: kernel)
        nll = loss.linear_cross_entropy(*tensors, targets, cap, z)
        found.append([nll.detach(), *torch.autograd.grad(nll, tensors)])
    assert all(near(one, theirs, 1e-5) for one, theirs in zip(*found, strict=True))


def test_columns_that_are_no_words_have_no_probability_and_no_gradient() -> None:
    logits, bias = torch.randn(4, 128, device=DEVICE), torch.full((128,), -torch.inf, device=DEVICE)
    bias[:70] = 0
    targets = torch.tensor([0, 69, IGNORE, 3], device=DEVICE)
    wanted = F.cross_entropy(logits[:, :70].double(), targets, reduction="none", ignore_index=IGNORE)
    assert near(cross_entropy(logits, bias, targets, True), wanted, 1e-6)
    assert (logits[:, 70:] == 0).all() and (logits[2] == 0).all()
    torch.testing.assert_close(logits.sum(1), torch.zeros(4, device=DEVICE), rtol=0, atol=1e-5)


@pytest.mark.parametrize("block", [16, 64])
def test_rows_wider_than_a_block_are_joined(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from pkm.model import triton_loss

    monkeypatch.setattr(triton_loss, "BLOCK", block)
    # The largest logits where a later block must take over from the first, and where it must not.
    logits = torch.randn(3, 192, device=DEVICE) * torch.tensor([[1.0], [40.0], [1e4]], device=DEVICE)
    targets = torch.tensor([191, 5, 100], device=DEVICE)
    wanted = F.cross_entropy(logits.double(), targets, reduction="none")
    assert near(cross_entropy(logits.clone(), torch.zeros(192, device=DEVICE), targets, False), wanted, 1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_the_loss(bad: float) -> None:
    logits, targets = torch.randn(2, 64, device=DEVICE), torch.tensor([1, 2], device=DEVICE)
    logits[0, 40] = bad
    nll = cross_entropy(logits, torch.zeros(64, device=DEVICE), targets, True)
    assert nll.isfinite().tolist() == [False, True]


def test_a_batch_that_is_ignored_whole_has_no_loss_and_no_gradient() -> None:
    tensors, targets = inputs(5, 4, 9, torch.bfloat16)
    targets[:] = IGNORE
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        nll = loss.linear_cross_entropy(*tensors, targets)
    nll.backward()
    assert nll == 0 and all((t.grad == 0).all() for t in tensors)  # type: ignore[union-attr]
