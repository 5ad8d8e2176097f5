"""Training on a GPU; skipped without one."""

import pytest
import torch

from pkm.run.metrics import read
from tests.support.tiny import everything

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Widths and windows that tensor cores and the kernels meet in earnest.
SIZES = {
    "device": "cuda",
    "corpus": {"context": 32},
    "model": {"dim": 64, "heads": 4},
    "memory": {"sub_keys": 16, "heads": 4, "knn": 8, "query": {"dim": 32}},
    "log": {"every_steps": 1},
}


def merged(**more):
    optim = {"batch_tokens": 512, "dense": {"lr": 3e-3}, **more.pop("optim", {})}
    return {**SIZES, "optim": optim, **more}


def losses(directory):
    return [r["loss"] for r in read(directory / "metrics.jsonl") if r["kind"] == "train"]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_every_precision_learns_compiled_or_not(train, precision, compiled):
    *_, directory = train(**merged(precision=precision, compile=compiled, optim={"steps": 60}))
    assert losses(directory)[-1] < 0.8 * losses(directory)[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_fp32(train, precision):
    exact, half = (losses(train(name=p, **merged(precision=p, optim={"steps": 10}))[-1]) for p in ("fp32", precision))
    assert half[-1] == pytest.approx(exact[-1], rel=0.05)


def test_training_curves_of_the_kernels_and_the_reference_agree(train):
    memory = SIZES["memory"]
    curves = [
        losses(train(name=k, **merged(precision="fp32", memory={**memory, "kernels": k}, optim={"steps": 20}))[-1])
        for k in ("reference", "triton")
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_resumed_on_a_gpu_ends_with_the_bits_of_one_that_was_not(train, precision):
    """The loss scale of fp16 comes back too."""
    sizes = dict(precision=precision)
    model, optim, state, _ = train(name="whole", **merged(**sizes, optim={"steps": 12}))
    train(name="parts", **merged(**sizes, optim={"steps": 7}))
    again, its_optim, its_state, _ = train(name="parts", **merged(**sizes, optim={"steps": 12}))
    assert state.loss_scale == its_state.loss_scale and (precision == "bf16" or state.loss_scale["value"] > 1)
    ours, theirs = everything(model, optim), everything(again, its_optim)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_recomputed_activations_learn_the_same(train):
    plain, again = (
        losses(train(name=str(on), **merged(parallel={"activation_checkpointing": on}, optim={"steps": 10}))[-1])
        for on in (False, True)
    )
    assert plain == pytest.approx(again, rel=1e-2)
