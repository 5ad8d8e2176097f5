"""A run that is killed goes on where it was, and ends bit by bit as if nothing had been."""

import random
import signal

import pytest

from pkm.checkpoint.save import POINTS


def test_the_run_to_compare_with_is_worth_it(runs):
    whole = runs.outcome("whole")
    assert whole["status"][:2] == ("finished", 24)
    assert [r["step"] for r in whole["metrics"] if r["kind"] == "train"] == list(range(1, 25))
    assert [r["step"] for r in whole["metrics"] if r["kind"] == "valid"] == [6, 12, 18, 24]
    assert [r["step"] for r in whole["metrics"] if r["kind"] == "test"] == [24]
    assert list(whole["checkpoints"]) == ["step-0000020", "step-0000024"]
    tensors = runs.checkpoints("whole").load("latest").tensors
    assert any("exp_avg_sq" in name or "second" in name for name in tensors) and any(
        "running" in name for name in tensors
    )


def test_the_same_command_twice_gives_the_same_run(runs):
    assert runs.run("again").code == 0
    assert runs.outcome("again") == runs.outcome("whole")


def test_another_seed_gives_another_run(runs):
    assert runs.run("other", "seed=2").code == 0
    assert runs.outcome("other")["checkpoints"] != runs.outcome("whole")["checkpoints"]


@pytest.mark.parametrize("save", [1, 5], ids=["first", "later"])
@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_at_a_named_point_of_a_save_ends_bit_identical(runs, point, save):
    name = f"{point.replace(':', '-')}-{save}"
    pieces = len(runs.checkpoints("whole").load("latest").tensors) + 1
    # A save passes in-shard once a piece of the file, and in-retention once a checkpoint that goes: the third is the first to.
    pass_ = {"in-shard": (save - 1) * pieces + pieces // 2, "in-retention": max(save - 2, 1)}
    fault = f"{point}#{pass_.get(point.removeprefix('checkpoint:'), save)}"
    killed = runs.run(name, environment={"PKM_FAULT": fault})
    assert killed.code == -signal.SIGKILL, killed.err
    resumed = runs.run(name)
    assert resumed.code == 0, resumed.err
    assert runs.outcome(name) == runs.outcome("whole")


@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_at_random_moments_ends_bit_identical_each_time(runs, seed):
    generator, found = random.Random(seed), set()
    for attempt in range(5):
        name = f"random-{seed}-{attempt}"
        killed = runs.run(name, **runs.moment(generator))
        assert killed.code == -signal.SIGKILL, killed.err
        found.add(tuple(runs.checkpoints(name).steps()))
        resumed = runs.run(name)
        assert resumed.code == 0, resumed.err
        assert runs.outcome(name) == runs.outcome("whole")
    assert len(found) > 3, "the moments were all alike"


def test_a_run_that_is_killed_again_and_again_ends_bit_identical(runs):
    # Each start gets a little further than a save: it dies in the third save it begins, at another point each time.
    for start, point in enumerate(POINTS):
        ended = runs.run("again-and-again", environment={"PKM_FAULT": f"{point}#{2 if start % 2 else 1}"})
        if ended.code == 0:
            break
    assert start >= 4
    assert runs.run("again-and-again").code == 0
    assert runs.outcome("again-and-again") == runs.outcome("whole")
