"""Checkpoints are saved whole or not at all."""

import errno
import json
import os
import resource
import signal

import pytest
import safetensors.torch
import torch

from pkm import files
from pkm.checkpoint import tensor_file
from pkm.checkpoint.checkpoints import Checkpoints
from pkm.checkpoint.save import POINTS
from pkm.errors import UserError
from tests.support.checkpoints import MANIFEST, SHARD, flip, holds, names, saved, warnings_of, weights
from tests.support.fork import error_of, exit_code_of, small_disk, without_root


def test_what_was_saved_comes_back_bit_for_bit(tmp_path):
    tensors = {dtype_name: torch.tensor([[0, 1, 2]]).to(dtype) for dtype, dtype_name in tensor_file.DTYPES.items()}
    tensors |= {
        "scalar": torch.tensor(1 / 3),
        "empty": torch.zeros(0, 7),
        "transposed": torch.randn(4, 5).t(),
        "slice": torch.randn(6, 6)[1:3, ::2],
        "minus zero": torch.tensor([0.0, -0.0]),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    record = {"loss": 0.1, "best": float("inf"), "list": [1, None, "ü\n"], "nested": {"b": 1, "a": 2}}
    Checkpoints(tmp_path, 1).save(3, tensors, record)
    loaded = Checkpoints(tmp_path, 1).newest()
    assert loaded.record == record and list(loaded.record["nested"]) == ["b", "a"]
    assert loaded.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype and loaded.tensors[name].shape == tensor.shape
        assert (
            tensor.contiguous().reshape(-1).view(torch.uint8).equal(loaded.tensors[name].reshape(-1).view(torch.uint8))
        )


def test_the_files_are_what_the_safetensors_library_reads_and_writes(tmp_path):
    tensors = weights(3) | {"odd": torch.ones(3, dtype=torch.uint8), "half": torch.ones(5, dtype=torch.bfloat16)}
    directory = Checkpoints(tmp_path, 1).save(3, tensors, {})
    theirs = safetensors.torch.load_file(directory / SHARD)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors.items())
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors")
    ours = tensor_file.opened(tmp_path / "theirs.safetensors")
    assert all(torch.equal(ours.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_the_manifest_says_sizes_hashes_shapes_dtypes_and_the_version_of_the_code(tmp_path):
    directory = saved(tmp_path, 3).directory(3)
    written = json.loads((directory / MANIFEST).read_text())
    assert written["files"][SHARD] == {
        "bytes": (directory / SHARD).stat().st_size,
        "sha256": files.sha256(directory / SHARD),
    }
    assert written["tensors"]["a"]["dtype"] == "F32" and written["tensors"]["a"]["shape"] == [40, 3]
    assert written["code"]["torch"] == torch.__version__ and written["code"]["pkm"]


def test_a_checkpoint_is_never_overwritten(tmp_path):
    checkpoints = saved(tmp_path, 3)
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in checkpoints.directory(3).iterdir()}
    checkpoints.save(3, weights(4), {})
    saved(tmp_path, 3)
    assert before == {
        path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in checkpoints.directory(3).iterdir()
    }


def test_the_metrics_are_made_durable_before_the_checkpoint_that_counts_on_them(tmp_path):
    seen = []
    checkpoints = Checkpoints(tmp_path, 1, before_save=lambda: seen.append(checkpoints.steps()))
    checkpoints.save(3, weights(3), {})
    assert seen == [[]]


# ---- killed in a save -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point", [*POINTS, "checkpoint:in-shard#2", "checkpoint:in-shard#3", "checkpoint:in-retention#2"]
)
def test_a_killed_save_leaves_the_previous_checkpoint_usable(tmp_path, monkeypatch, point):
    checkpoints = saved(tmp_path, 1, 2, 3, best=(1, 3))
    monkeypatch.setenv("PKM_FAULT", point)
    assert exit_code_of(lambda: saved(tmp_path, 4, keep=1, best=(4,))) == -signal.SIGKILL
    monkeypatch.delenv("PKM_FAULT")

    published = POINTS.index(point.split("#")[0]) >= POINTS.index("checkpoint:after-rename")
    loaded, heard = warnings_of(tmp_path, keep=1)
    assert holds(loaded, 4 if published else 3)
    assert (not published) == any("half-written" in line for line in heard)
    assert checkpoints.load("best").step == loaded.step
    assert names(tmp_path) == ["best", "latest", f"step-{loaded.step:07d}"]

    # The run goes on from there and ends as if nothing had been.
    saved(tmp_path, 4, 5, keep=1, best=(4,))
    assert names(tmp_path) == ["best", "latest", "step-0000004", "step-0000005"]
    assert holds(checkpoints.load("best"), 4) and holds(checkpoints.load("latest"), 5)


def test_a_save_killed_while_it_replaces_a_damaged_checkpoint_loses_nothing_that_was_whole(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 1, 2)
    flip(checkpoints.directory(2) / SHARD, -1)
    for point in POINTS:
        monkeypatch.setenv("PKM_FAULT", point)
        exit_code_of(lambda: saved(tmp_path, 2))
        assert holds(warnings_of(tmp_path)[0], 1) or holds(warnings_of(tmp_path)[0], 2)
    monkeypatch.delenv("PKM_FAULT")
    saved(tmp_path, 2)
    assert holds(checkpoints.newest(), 2) and names(tmp_path) == ["latest", "step-0000001", "step-0000002"]


# ---- disks that say no ----------------------------------------------------------------------------------------------


def assert_only_step_1_is_there(root):
    assert names(root) == ["latest", "step-0000001"] and holds(Checkpoints(root, 1).newest(), 1)


def test_a_disk_that_fills_up_during_a_save_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    with small_disk(tmp_path / "disk", 3000) as disk:
        saved(disk / "c", 1)
        big = {"a": torch.zeros(1000, 1024)}
        with pytest.raises(UserError, match=r"step 2: it takes .* MB and the disk has .* MB free[^$]*step 1"):
            Checkpoints(disk / "c", 1).save(2, big, {})
        assert_only_step_1_is_there(disk / "c")
        # As when another process fills the disk after the look at its free space.
        monkeypatch.setattr(files, "free_bytes", lambda path: 1 << 40)
        with pytest.raises(UserError, match="step 2: the disk is full"):
            Checkpoints(disk / "c", 1).save(2, big, {})
        assert_only_step_1_is_there(disk / "c")
        Checkpoints(disk / "c", 1).save(2, weights(2), {"step was": 2})
        assert holds(Checkpoints(disk / "c", 1).newest(), 2)


def test_a_limit_on_file_sizes_is_named(tmp_path):
    saved(tmp_path, 1)
    error = error_of(
        lambda: Checkpoints(tmp_path, 1).save(2, weights(2, size=10_000), {}),
        UserError,
        before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert "step 2: the file grew past the largest size" in error
    assert_only_step_1_is_there(tmp_path)


@pytest.mark.parametrize(
    ("module", "function"),
    [(tensor_file, "write"), (files, "atomic_write"), (files, "fsync_directory"), (files, "publish")],
)
def test_a_full_disk_at_any_stage_of_a_save_leaves_the_previous_checkpoint(tmp_path, monkeypatch, module, function):
    saved(tmp_path, 1)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, function, full)
    with pytest.raises(UserError, match="step 2: the disk is full"):
        saved(tmp_path, 2)
    monkeypatch.undo()
    assert_only_step_1_is_there(tmp_path)


def test_checkpoints_that_cannot_be_written_or_read_are_named(tmp_path):
    root = tmp_path / "checkpoints"
    saved(root, 1, 2)
    os.chmod(root, 0o555)
    error = error_of(lambda: saved(root, 3), UserError, before=without_root)
    assert "cannot save the checkpoint of step 3: no permission" in error and str(root) in error
    os.chmod(root, 0o777)

    heard = tmp_path / "heard"
    os.chmod(root / "step-0000002" / SHARD, 0)
    assert not error_of(
        lambda: heard.write_text(warnings_of(root, lambda c: c.load("latest"))[1][0]), UserError, before=without_root
    )
    assert f"step-0000002 is damaged: {SHARD} cannot be read: no permission" in heard.read_text()

    os.chmod(root, 0)
    error = error_of(lambda: Checkpoints(root, 1).newest(), UserError, before=without_root)
    assert f"{root}: no permission" in error
    os.chmod(root, 0o777)


@pytest.mark.parametrize("which", ["best", "latest"])
def test_where_there_is_no_checkpoint_at_all_that_is_said_whichever_is_asked_for(tmp_path, which):
    with pytest.raises(UserError, match="there is no checkpoint") as refused:
        Checkpoints(tmp_path, 1).load(which)
    assert refused.value.fix == "train first"


def test_a_file_where_the_checkpoints_should_be_is_named(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UserError, match="checkpoints: a file stands where a directory is needed"):
        Checkpoints(tmp_path / "checkpoints", 1).load("latest")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_with_a_number_that_is_not_finite_is_refused_and_the_good_ones_stay(tmp_path, in_background, bad):
    saved(tmp_path, 1, 2)
    checkpoints = Checkpoints(tmp_path, keep=1, in_background=in_background)
    tensors = weights(3) | {"moments": torch.zeros(4, 5, dtype=torch.bfloat16)}
    tensors["moments"][3, 1] = bad
    with pytest.raises(UserError, match=r"step 3: there are numbers that are not finite in moments") as caught:
        checkpoints.save(3, tensors, {})
    assert "goes on from step 2" in caught.value.fix
    assert names(tmp_path) == ["latest", "step-0000001", "step-0000002"] and holds(checkpoints.newest(), 2)


def test_numbers_of_any_kind_and_none_at_all_are_finite(tmp_path):
    tensors = {
        "large": torch.tensor([1e300, -1e300], dtype=torch.float64),
        "none": torch.empty(0, 3),
        "flag": torch.tensor(True),
    }
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, tensors, {})
    assert checkpoints.steps() == [1]
