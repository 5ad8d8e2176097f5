"""Several ranks give what one gives: tensor by tensor, since a gradient off by a factor is nearly invisible after Adam."""

import subprocess
import sys

import pytest
import torch

from tests.ranks import CASES, measure


@pytest.fixture(scope="module", params=[2, 4])
def on_ranks(request, tiny_corpus_path, tmp_path_factory):
    """CASE -> what `measure` found, on 2 and on 4 processes that talk by gloo."""
    out = tmp_path_factory.mktemp("ranks") / "found.pt"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}"]
    command = [*torchrun, "-m", "tests.ranks", str(tiny_corpus_path), str(out), *CASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize("case", CASES)
def test_ranks_find_the_losses_gradients_and_usage_of_one_process(on_ranks, tiny_corpus_path, case):
    found, alone = on_ranks[case], measure(tiny_corpus_path, case)
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    for ours, theirs in zip(found["norms"], alone["norms"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    for ours, theirs in zip(found["gradients"], alone["gradients"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(
                ours[name], theirs[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert [u for pair in found["usage"] for u in pair] == pytest.approx(
        [u for pair in alone["usage"] for u in pair], rel=1e-4
    )
    assert found["valid"][0] == pytest.approx(alone["valid"][0], rel=1e-5)
    # Later ones are wider apart: where a gradient is zero but for rounding (a key's bias), Adam takes a whole step.
    for ours, theirs in zip(found["valid"], alone["valid"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2)
