"""Which checkpoint is loaded, and what is said of those that cannot be."""

import pytest
import torch

from pkm.checkpoint import tensor_file
from pkm.checkpoint.checkpoints import Checkpoints
from pkm.errors import UserError
from tests.support.checkpoints import MANIFEST, SHARD, flip, holds, names, rewritten, saved, warnings_of


def test_several_damaged_checkpoints_are_all_named(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3)
    flip(checkpoints.directory(3) / SHARD, -1)
    (checkpoints.directory(2) / MANIFEST).unlink()
    loaded, heard = warnings_of(tmp_path)
    assert holds(loaded, 1) and "step-0000003" in heard[0] and "step-0000002" in heard[1]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_again_from_step_0(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    for step in (1, 2):
        flip(checkpoints.directory(step) / SHARD, -1)
    with pytest.raises(UserError, match="none of the 2 checkpoints"):
        Checkpoints(tmp_path, 10, warn=lambda line: None).newest()


def test_without_any_checkpoint_there_is_none_to_load(tmp_path):
    assert Checkpoints(tmp_path / "missing", 1).newest() is None
    with pytest.raises(UserError, match="no checkpoint"):
        Checkpoints(tmp_path / "missing", 1).load("latest")


def test_a_checkpoint_of_a_later_format_is_refused_and_not_skipped(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    rewritten(checkpoints.directory(2), format=99)
    with pytest.raises(UserError, match="format 99"):
        checkpoints.newest()


def test_a_checkpoint_of_another_torch_is_loaded_with_a_warning(tmp_path):
    rewritten(saved(tmp_path, 1).directory(1), code={"pkm": "0.1.0", "commit": None, "torch": "1.0"})
    loaded, heard = warnings_of(tmp_path)
    assert holds(loaded, 1) and "torch 1.0" in heard[0]


def test_a_table_in_parts_of_several_ranks_is_put_together(tmp_path):
    whole = torch.randn(6, 5)
    directory = saved(tmp_path, 1).directory(1)
    parts, listed = [], {}
    for rank, columns in enumerate([(0, 2), (2, 5)]):
        piece, name = whole[:, columns[0] : columns[1]], f"rank-{rank:05d}.safetensors"
        (directory / name).unlink(missing_ok=True)
        size, digest = tensor_file.write(directory / name, {"values": piece})
        listed[name] = {"bytes": size, "sha256": digest}
        parts.append({"file": name, "start": [0, columns[0]], "shape": list(piece.shape)})
    rewritten(directory, files=listed, tensors={"values": {"dtype": "F32", "shape": [6, 5], "parts": parts}})
    assert torch.equal(Checkpoints(tmp_path, 1).load(1).tensors["values"], whole)


@pytest.mark.parametrize("which", [1, "1", "latest"])
def test_reading_a_checkpoint_writes_nothing(tmp_path, which):
    checkpoints = saved(tmp_path, 1)
    (tmp_path / "latest").unlink()
    assert holds(checkpoints.load(which), 1) and names(tmp_path) == ["step-0000001"]


def test_what_cannot_be_loaded_is_named(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    assert holds(checkpoints.load(checkpoints.directory(1)), 1)
    with pytest.raises(UserError, match=r"step-0000007.*\n.*1, 2"):
        checkpoints.load(7)
    with pytest.raises(UserError, match="no checkpoint is the best one"):
        checkpoints.load("best")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match=f"{MANIFEST} is missing"):
        checkpoints.load(tmp_path / "nothing")
