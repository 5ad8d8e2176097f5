"""Which checkpoints stay, and which one is the best."""

import pytest

from pkm.checkpoint import verify
from pkm.checkpoint.checkpoints import Checkpoints
from pkm.checkpoint.manifest import Damaged
from pkm.errors import UserError
from tests.support.checkpoints import SHARD, flip, holds, names, saved, warnings_of, weights


def test_the_newest_and_the_best_stay(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3, 4, 5, keep=2, best=(1, 2))
    assert checkpoints.steps() == [2, 4, 5]
    assert (tmp_path / "latest").read_text() == "step-0000005\n"
    assert (tmp_path / "best").read_text() == "step-0000002\n"


def test_a_damaged_checkpoint_does_not_count_among_those_that_stay(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3, keep=3)
    flip(checkpoints.directory(3) / SHARD, -1)
    checkpoints.save(4, weights(4), {"step was": 4})
    flip(checkpoints.directory(2) / SHARD, -1)
    saved(tmp_path, 5, keep=3)
    assert checkpoints.steps() == [1, 2, 3, 4, 5]
    saved(tmp_path, 6, keep=3)
    assert checkpoints.steps() == [4, 5, 6]


def test_nothing_is_removed_when_the_new_checkpoint_reads_back_differently(tmp_path, monkeypatch):
    saved(tmp_path, 1, 2, keep=1)
    real = verify.check

    def bad_disk(directory, *rest):
        if directory.name == "step-0000003":
            raise Damaged(f"{SHARD} has changed")
        return real(directory, *rest)

    monkeypatch.setattr(verify, "check", bad_disk)
    with pytest.raises(UserError, match=r"reads back differently.*has changed"):
        saved(tmp_path, 3, keep=1)
    monkeypatch.undo()
    assert Checkpoints(tmp_path, 1).steps() == [2, 3]


def test_a_damaged_checkpoint_is_replaced_when_the_run_comes_to_its_step_again(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    flip(checkpoints.directory(2) / SHARD, -1)
    saved(tmp_path, 2)
    assert holds(checkpoints.newest(), 2) and names(tmp_path) == ["latest", "step-0000001", "step-0000002"]


def test_the_best_is_that_of_the_checkpoint_the_run_went_back_to(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3, best=(1, 3))
    flip(checkpoints.directory(3) / SHARD, -1)
    assert holds(warnings_of(tmp_path)[0], 2)
    assert holds(checkpoints.load("best"), 1)


def test_a_damaged_best_is_forgotten_by_a_run_that_went_back_before_it(tmp_path):
    checkpoints = saved(tmp_path, 1, 3, best=(3,))
    flip(checkpoints.directory(3) / SHARD, -1)
    assert holds(warnings_of(tmp_path)[0], 1)
    saved(tmp_path, 2)
    with pytest.raises(UserError, match="no checkpoint is the best one"):
        checkpoints.load("best")


def test_a_step_that_turns_out_best_after_its_save_is_kept_as_best(tmp_path):
    checkpoints = saved(tmp_path, 1, keep=1)
    checkpoints.save(1, weights(1), {}, best=True)
    assert saved(tmp_path, 2, 3, keep=1).steps() == [1, 3]
    assert holds(checkpoints.newest(), 3) and holds(checkpoints.load("best"), 1)


def test_a_garbled_pointer_file_is_not_believed(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, best=(1,))
    (tmp_path / "best").write_text("../../etc\n")
    (tmp_path / "latest").write_text("\0")
    assert holds(checkpoints.load("best"), 1) and holds(checkpoints.load("latest"), 2)
