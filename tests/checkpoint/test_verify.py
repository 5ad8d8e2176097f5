"""Damage of any kind in a checkpoint is found, named by its file, and no code in one is run."""

import json
import os
import pickle

import pytest

from pkm import files
from pkm.checkpoint.checkpoints import Checkpoints
from pkm.checkpoint.manifest import Damaged
from pkm.checkpoint.verify import verify
from pkm.errors import UserError
from tests.support.checkpoints import MANIFEST, SHARD, flip, holds, rewritten, saved, warnings_of


@pytest.mark.parametrize("name", [SHARD, MANIFEST])
def test_a_flipped_bit_anywhere_in_any_file_is_found_and_named_and_the_one_before_is_used(tmp_path, name):
    saved(tmp_path, 1, 2)
    path = tmp_path / "step-0000002" / name
    whole = path.read_bytes()
    for position in range(len(whole)):
        flip(path, position)
        with pytest.raises(Damaged, match=name):
            verify(path.parent)
        path.write_bytes(whole)
    flip(path, len(whole) // 2)
    loaded, heard = warnings_of(tmp_path)
    assert holds(loaded, 1)
    assert "step-0000002 is damaged" in heard[0] and name in heard[0]
    assert "step 1" in heard[1]


@pytest.mark.parametrize("name", [SHARD, MANIFEST])
@pytest.mark.parametrize("length", [0, 1, 100])
def test_a_truncated_file_is_named_and_the_checkpoint_before_is_used(tmp_path, name, length):
    saved(tmp_path, 1, 2)
    os.truncate(tmp_path / "step-0000002" / name, length)
    loaded, heard = warnings_of(tmp_path)
    assert holds(loaded, 1) and name in heard[0]


@pytest.mark.parametrize("name", [SHARD, MANIFEST])
def test_a_missing_file_is_named_and_the_checkpoint_before_is_used(tmp_path, name):
    saved(tmp_path, 1, 2)
    (tmp_path / "step-0000002" / name).unlink()
    loaded, heard = warnings_of(tmp_path)
    assert holds(loaded, 1) and f"{name} is missing" in heard[0]


class Bomb:
    def __reduce__(self):
        return (os._exit, (66,))


@pytest.mark.parametrize("name", ["weights.pt", "../rank-00000.safetensors", "rank-00001.safetensors"])
def test_pickled_code_in_a_checkpoint_is_refused_and_not_run(tmp_path, name):
    directory = saved(tmp_path, 1).directory(1)
    (directory / name).write_bytes(pickle.dumps(Bomb()))
    entry = {"bytes": (directory / name).stat().st_size, "sha256": files.sha256(directory / name)}
    rewritten(directory, files={name: entry})
    with pytest.raises(UserError, match="safetensors"):
        Checkpoints(tmp_path, 1).load(1)


def test_a_file_that_holds_another_shape_than_the_manifest_says_is_damaged(tmp_path):
    directory = saved(tmp_path, 1).directory(1)
    tensors = json.loads((directory / MANIFEST).read_text())["tensors"]
    tensors["a"]["parts"][0]["shape"] = [3, 40]
    rewritten(directory, tensors=tensors)
    with pytest.raises(UserError, match="holds a as"):
        Checkpoints(tmp_path, 1).load(1)
