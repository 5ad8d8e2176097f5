"""A run goes on with another number of ranks, or with its values shared out differently, as if nothing had changed."""

import pytest
import torch

# No dropout, whose masks a rank draws for itself; statistics of a whole batch, which is cut up differently.
PLAIN = ("model.dropout=0.0", "optim.micro_batch=null")
SHARDED, REPLICATED = "parallel.values=sharded", "parallel.values=replicated"


def stop_at(step):
    return {0: {"when": {"step": step, "signals": ["SIGTERM"]}}}


@pytest.fixture(scope="module")
def alone(runs):
    assert runs.run("plain", *PLAIN).code == 0
    return runs.metrics("plain")


@pytest.mark.parametrize(
    "turns",
    [
        [(1, REPLICATED), (2, REPLICATED), (4, REPLICATED)],
        [(2, REPLICATED), (2, SHARDED), (2, REPLICATED)],
        [(4, SHARDED), (2, SHARDED), (1, SHARDED)],
    ],
    ids=["more ranks", "sharded for a while", "fewer ranks"],
)
def test_the_batches_and_learning_rates_stay_those_of_one_rank(runs, alone, turns):
    name = "-".join(f"{ranks}{values[16]}" for ranks, values in turns)
    for (ranks, values), until in zip(turns, (5, 10), strict=False):
        ended = runs.run_ranks(ranks, name, *PLAIN, values, on=stop_at(until))
        assert [end.code for end in ended] == [0] * ranks, [end.err for end in ended]
        assert runs.status(name) == ("stopped", until, "SIGTERM")
    ranks, values = turns[-1]
    runs.finish(ranks, name, *PLAIN, values)
    ours = runs.metrics(name)
    assert [(r["kind"], r["step"], r.get("lr")) for r in ours] == [(r["kind"], r["step"], r.get("lr")) for r in alone]
    assert runs.losses(name)[:12] == pytest.approx(runs.losses("plain")[:12], rel=1e-3)
    assert runs.losses(name) == pytest.approx(runs.losses("plain"), rel=2e-2)


def test_what_sharded_ranks_wrote_is_exported_whole(runs):
    runs.finish(2, "to-export", SHARDED)
    directory = runs.root / "exported"
    ended = runs.server.run(str(runs.directory("to-export")), str(directory), program="scripts.export")
    assert ended.code == 0, ended.err
    from safetensors.torch import load_file

    exported = load_file(directory / "model.safetensors")
    best = runs.checkpoints("to-export").load("best").tensors
    weights = {name.removeprefix("model."): tensor for name, tensor in best.items() if name.startswith("model.")}
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    assert exported["blocks.1.memory.values.weight"].shape == (64, 16)
