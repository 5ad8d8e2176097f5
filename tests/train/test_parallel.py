"""Several ranks give what one gives: tensor by tensor, since a gradient off by a factor is nearly invisible after Adam."""

import functools
import subprocess
import sys

import pytest
import torch

from pkm.device import configure_torch, decide, pick_device
from pkm.distributed.torchrun import ONE_NODE
from pkm.errors import UserError
from tests.support.ranks import CASES, measure
from tests.support.tiny import tiny_config

# On four processes, what on two says all there is to say of what else may be asked for.
ON_FOUR = [case for case in CASES if case.endswith(("-plain", "-accumulated"))]


@functools.cache
def on_ranks(ranks, corpus, out):
    """CASE -> what `measure` found on that many processes, which talk by gloo."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", *ONE_NODE, f"--nproc-per-node={ranks}"]
    command = [*torchrun, "-m", "tests.support.ranks", str(corpus), str(out), *(ON_FOUR if ranks == 4 else CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=True)


@functools.cache
def alone(corpus, case):
    # Neither compiling nor recomputing may change what is found: they are held to a model that does without.
    return measure(corpus, case.replace("-compiled", "-plain").replace("-recomputed", "-plain"))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.mark.parametrize(("ranks", "case"), [(2, case) for case in CASES] + [(4, case) for case in ON_FOUR])
def test_ranks_find_the_losses_gradients_and_usage_of_one_process(tiny_corpus_path, out, ranks, case):
    found, expected = on_ranks(ranks, tiny_corpus_path, out / f"{ranks}.pt")[case], alone(tiny_corpus_path, case)
    if case.endswith("bf16"):
        return assert_close_in_bf16(found, expected)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for ours, theirs in zip(found["norms"], expected["norms"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    for ours, theirs in zip(found["gradients"], expected["gradients"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(
                ours[name], theirs[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert [u for pair in found["usage"] for u in pair] == pytest.approx(
        [u for pair in expected["usage"] for u in pair], rel=1e-4
    )
    assert found["valid"][0] == pytest.approx(expected["valid"][0], rel=1e-5)
    # Later ones are wider apart: Adam's first steps divide small gradients by their own size.
    for ours, theirs in zip(found["valid"], expected["valid"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2)


def assert_close_in_bf16(found, expected):
    """Of its 8 bits the last are lost where a rank's own sum is rounded before the others' is added: 3 % of a gradient.

    What was read is compared before the first update: after it, some scores that were nearly alike have changed places.
    """
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
    for ours, theirs in zip(found["norms"], expected["norms"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2)
    for name, theirs in expected["gradients"][0].items():
        assert (found["gradients"][0][name] - theirs).norm() < 0.03 * theirs.norm() + 1e-3, name
    assert found["usage"][0] == pytest.approx(expected["usage"][0], rel=1e-2)
    assert [loss for loss, *_ in found["valid"]] == pytest.approx([loss for loss, *_ in expected["valid"]], rel=1e-2)


@pytest.mark.parametrize(("ranks", "case"), [(2, case) for case in CASES] + [(4, case) for case in ON_FOUR])
def test_what_every_rank_holds_stays_the_same_on_all_to_the_last_bit(tiny_corpus_path, out, ranks, case):
    assert on_ranks(ranks, tiny_corpus_path, out / f"{ranks}.pt")[case]["replicas differ in"] == []


def test_a_ranks_gpu_is_the_current_one_which_kernels_and_streams_take(monkeypatch):
    config, taken = tiny_config(device="cuda", precision="fp32"), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "2")
    configure_torch(config, decide(config))
    assert taken == [torch.device("cuda", 2)]
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(UserError, match="4 GPUs, and none for local rank 4"):
        pick_device(config)
