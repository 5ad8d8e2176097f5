import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from pkm.corpus.batches import IGNORE
from pkm.model import compiled_loss, loss
from pkm.model.loss import linear_cross_entropy
from tests.support.interpreted import passes_in_tritons_interpreter


def inputs(dtype=torch.float64, n=13, d=5, v=11):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, generator=generator, dtype=dtype) for s in ((n, d), (v, d), (v,)))
    targets = torch.randint(0, v, (n,), generator=generator)
    targets[[2, 7]] = IGNORE
    return [t.requires_grad_() for t in (hidden, weight, bias)], targets


@pytest.mark.parametrize("chunk_logits", [11, 40, 10_000])
def test_loss_and_gradients_are_those_of_cross_entropy_over_all_logits(chunk_logits, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_LOGITS_CPU", chunk_logits)
    found = []
    for f in (linear_cross_entropy, lambda h, w, b, t: F.cross_entropy(F.linear(h, w, b), t, reduction="sum")):
        tensors, targets = inputs()
        nll = f(*tensors, targets)
        (nll * 0.25).backward()
        found.append([nll.detach().double(), *(t.grad for t in tensors)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_logits", [11, 40, 10_000])
@pytest.mark.parametrize(
    "cap, z, has_bias", [(1.5, 0.0, True), (None, 0.3, True), (1.5, 0.3, True), (None, 0.0, False)]
)
def test_capped_logits_z_loss_and_no_bias_give_the_gradients_of_their_definition(
    cap, z, has_bias, chunk_logits, monkeypatch
):
    monkeypatch.setattr(loss, "CHUNK_LOGITS_CPU", chunk_logits)
    (hidden, weight, bias), targets = inputs()
    ours = [hidden, weight, *([bias] if has_bias else [])]
    nll = linear_cross_entropy(hidden, weight, bias if has_bias else None, targets, cap, z)
    found = torch.autograd.grad(nll * 0.25, ours)
    logits = F.linear(hidden, weight, bias if has_bias else None)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    cross_entropy = F.cross_entropy(logits, targets, reduction="sum")
    wanted = cross_entropy + z * logits.logsumexp(1)[targets != IGNORE].square().sum()
    torch.testing.assert_close(nll.double(), cross_entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, torch.autograd.grad(wanted * 0.25, ours), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype, relative", [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_compiled_for_a_cpu_the_loss_is_exact_and_gradients_are_rounded_to_their_dtype_alone(
    dtype, relative, threads, monkeypatch
):
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(200, 77, generator=generator).mul(9).to(dtype)
    bias, targets = torch.randn(77, generator=generator), torch.randint(0, 70, (200,), generator=generator)
    bias[70:], targets[::9] = -torch.inf, IGNORE
    exact = (logits.double() + bias).requires_grad_()
    wanted = F.cross_entropy(exact, targets, reduction="none", ignore_index=IGNORE)
    z = 0.3 * exact.logsumexp(1).square()[targets != IGNORE]
    (by,) = torch.autograd.grad(wanted.sum() + z.sum(), exact)
    try:
        torch.set_num_threads(threads)
        evaluated = compiled_loss.cross_entropy(logits.clone(), bias, targets, False, z=0.3)
        losses = compiled_loss.cross_entropy(logits, bias, targets, True, z=0.3)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=1e-6, atol=1e-5)
    assert torch.equal(evaluated, losses)
    torch.testing.assert_close(logits.double(), by, rtol=relative, atol=2e-6)


def test_a_logit_that_is_not_finite_makes_the_compiled_loss_not_finite_and_no_others():
    for odd in (torch.nan, torch.inf):
        logits = torch.zeros(3, 40)
        logits[1, 7] = odd
        losses = compiled_loss.cross_entropy(logits, torch.zeros(40), torch.tensor([1, 2, 3]), True)
        assert losses.isfinite().tolist() == [True, False, True]


def test_large_losses_on_a_cpu_are_compiled_and_close_to_the_plain_ones(monkeypatch):
    found = []
    for numba in (True, False):
        tensors, targets = inputs(torch.float32, n=300, d=32, v=1000)
        if not numba:
            monkeypatch.setattr(loss, "compiled", lambda numbers: None)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            nll = linear_cross_entropy(*tensors, targets)
        nll.backward()
        found.append([nll.detach(), *(t.grad for t in tensors)])
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        assert (one - other).norm() < 5e-3 * other.norm()


def test_only_targets_that_are_scored_count():
    tensors, targets = inputs()
    targets[:] = IGNORE
    nll = linear_cross_entropy(*tensors, targets)
    nll.backward()
    assert nll == 0 and all((t.grad == 0).all() for t in tensors)


def test_under_autocast_the_loss_stays_fp32_and_gradients_close():
    tensors, targets = inputs(torch.float32, n=64, d=32, v=50)
    exact = linear_cross_entropy(*tensors, targets)
    exact.backward()
    wanted = tensors[1].grad.clone()
    tensors[1].grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nll = linear_cross_entropy(*tensors, targets)
    nll.backward()
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, exact, rtol=1e-2, atol=0)
    assert (tensors[1].grad - wanted).norm() < 2e-2 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_factor_of_the_gradients_is_not_rounded(dtype):
    """A batch of 24,576 tokens, under autocast; and a loss scale beyond fp16's range."""
    for factor in (1 / 24576, 70_000 / 2**10):
        found = []
        for scale in (1.0, factor):
            tensors, targets = inputs(torch.float32, n=64, d=32, v=50)
            with torch.autocast("cpu", dtype=dtype):
                nll = linear_cross_entropy(*tensors, targets)
            (nll * scale).backward()
            found.append([t.grad.double() for t in tensors])
        for one, scaled in zip(*found, strict=True):
            ratio = (scaled * one).sum() / (one * one).sum() / factor
            assert abs(ratio - 1) < 5e-4


def test_no_gradient_is_worked_out_at_evaluation():
    tensors, targets = inputs(n=13, d=5, v=11)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        assert not linear_cross_entropy(*tensors, targets).requires_grad
    assert counter.get_total_flops() == 2 * 13 * 5 * 11  # the logits, and nothing else


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_for_gpus_is_right_in_tritons_interpreter():
    passes_in_tritons_interpreter(Path(__file__).with_name("triton_loss_cases.py"))


@pytest.mark.parametrize(
    "tokens, sizes", [(16384, [4096] * 4), (4097, [4097]), (9000, [3008, 3008, 2984]), (1, [1]), (0, [])]
)
def test_on_a_gpu_chunks_are_alike_and_begin_at_multiples_of_64(tokens, sizes):
    """V of the paper, padded; 4,471 tokens fit."""
    slices = list(loss._chunks(tokens, 60_032, torch.device("cuda")))
    assert [len(range(tokens)[rows]) for rows in slices] == sizes
    assert all(rows.start % 64 == 0 for rows in slices)


def test_a_vocabulary_beyond_the_chunk_still_has_a_tile_of_tokens():
    assert [rows.start for rows in loss._chunks(130, 2**28, torch.device("cuda"))] == [0, 64, 128]
