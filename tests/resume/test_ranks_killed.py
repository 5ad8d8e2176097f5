"""A run on several ranks, one of which is killed, ends at once on all of them, goes on, and ends bit by bit the same."""

import random
import signal

import pytest

from pkm.checkpoint.save import POINTS
from pkm.checkpoint.tensor_file import described

# The rank that dies at each point of a save; rank 0 alone removes old checkpoints.
RANKS = dict(zip(POINTS, [1, 0, 1, 0, 1, 0, 1, 0, 1], strict=True))


@pytest.fixture(scope="session")
def whole(runs):
    """Uninterrupted runs on several ranks, by their number and settings."""
    made = {}

    def get(ranks, *settings):
        name = "-".join(["whole", str(ranks), *settings]).replace("=", "-").replace(" ", "-")
        if name not in made:
            runs.finish(ranks, name, *settings)
            made[name] = runs.outcome(name)
        return made[name]

    return get


def die(runs, ranks, name, *settings, rank, fault):
    """Have `rank` killed at a point of a save, and see the others end because of it."""
    ended = runs.run_ranks(ranks, name, *settings, on={rank: {"environment": {"PKM_FAULT": fault}}})
    assert ended[rank].code == -signal.SIGKILL
    for other, end in enumerate(ended):
        if other != rank:
            assert end.code == 2 and "another rank has ended" in end.err and "Traceback" not in end.err
    assert runs.status(name)[0] == "failed" and "lost another rank" in runs.log(name)


def test_two_ranks_share_the_bytes_of_a_checkpoint_and_hold_each_tensor_once(runs, whole):
    whole(2)
    checkpoint = runs.checkpoints("whole-2").load("latest")
    files = [checkpoint.directory / f"rank-0000{rank}.safetensors" for rank in (0, 1)]
    sizes = [path.stat().st_size for path in files]
    assert abs(sizes[0] - sizes[1]) < 0.1 * sum(sizes)
    alone = runs.checkpoints("whole").load("latest")
    assert checkpoint.entries.keys() == alone.entries.keys()
    parts = sum(len(described(path)) for path in files)
    assert len(alone.entries) <= parts <= len(alone.entries) + 1  # at most one is cut in two


@pytest.mark.parametrize("point", POINTS)
def test_a_rank_killed_at_a_named_point_of_a_save_ends_all_and_the_run_ends_bit_identical(runs, whole, point):
    name = f"2-{point.replace(':', '-')}"
    fault = f"{point}#{ {'in-shard': 45, 'in-retention': 1}.get(point.removeprefix('checkpoint:'), 3) }"
    die(runs, 2, name, rank=RANKS[point], fault=fault)
    runs.finish(2, name)
    assert runs.outcome(name) == whole(2)


@pytest.mark.parametrize(
    "point", ["checkpoint:in-shard#30", "checkpoint:after-manifest#2", "checkpoint:after-rename#3"]
)
def test_a_rank_of_four_with_sharded_values_killed_in_a_save_in_the_background_ends_bit_identical(runs, whole, point):
    settings = ("parallel.values=sharded", "checkpoint.in_background=true")
    name = f"4-{point.replace(':', '-').replace('#', '-')}"
    rank = random.Random(point).randrange(4)
    die(runs, 4, name, *settings, rank=rank, fault=point)
    runs.finish(4, name, *settings)
    assert runs.outcome(name) == whole(4, "parallel.values=sharded")


def test_statistics_of_each_rank_are_saved_as_their_mean_so_that_a_killed_run_ends_bit_identical(runs, whole):
    setting = "parallel.sync_batch_norm=false"
    die(runs, 2, "2-each", setting, rank=1, fault="checkpoint:end#2")
    runs.finish(2, "2-each", setting)
    assert runs.outcome("2-each") == whole(2, setting)
    assert whole(2, setting)["metrics"] != whole(2)["metrics"]


def test_a_report_counts_the_values_of_all_ranks(runs, whole):
    assert whole(2, "parallel.values=sharded")["report"]["parameters"] == whole(2)["report"]["parameters"]


@pytest.mark.parametrize(
    "settings", [(), ("parallel.values=sharded", "checkpoint.in_background=true")], ids=["plain", "sharded"]
)
def test_a_random_rank_killed_at_random_moments_ends_bit_identical_each_time(runs, whole, settings):
    expected, label = whole(2, *settings[:1]), len(settings)
    generator = random.Random(label)
    for attempt in range(6):
        name, rank = f"random-ranks-{label}-{attempt}", generator.randrange(2)
        ended = runs.run_ranks(2, name, *settings, on={rank: runs.moment(generator)})
        assert ended[rank].code == -signal.SIGKILL, ended[rank].err
        runs.finish(2, name, *settings)
        assert runs.outcome(name) == expected


def test_saves_in_the_background_change_nothing_in_the_run(runs, whole):
    runs.finish(2, "in-background", "checkpoint.in_background=true")
    assert runs.outcome("in-background") == whole(2)
    assert runs.run("in-background-alone", "checkpoint.in_background=true").code == 0
    assert runs.outcome("in-background-alone") == runs.outcome("whole")
