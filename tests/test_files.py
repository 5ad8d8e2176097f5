"""pkm/files.py: a file is whole or it is not there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pkm import files
from pkm.errors import UserError


def refuse(code: int):
    def refuses(*arguments, **named):
        raise OSError(code, os.strerror(code))

    return refuses


def test_atomic_write_makes_parents_and_replaces_text_and_bytes(tmp_path: Path):
    path = tmp_path / "a" / "b"
    files.atomic_write(path, "é")
    assert path.read_bytes() == "é".encode()
    files.atomic_write(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert [p.name for p in path.parent.iterdir()] == ["b"]


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "disk is full"), (errno.EACCES, "no permission"), (errno.EROFS, "read-only")]
)
def test_a_write_that_the_disk_refuses_leaves_the_old_file_and_says_why(tmp_path: Path, monkeypatch, code, words):
    path = tmp_path / "file"
    files.atomic_write(path, "old")
    monkeypatch.setattr(files.os, "fsync", refuse(code))
    with pytest.raises(UserError, match=words) as caught:
        files.atomic_write(path, "new")
    assert caught.value.where == str(path)
    assert caught.value.fix
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_crash_before_the_rename_leaves_the_old_file(tmp_path: Path, monkeypatch):
    path = tmp_path / "file"
    files.atomic_write(path, "old")

    def dies(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        files.atomic_write(path, "new")
    assert path.read_text() == "old"


def test_an_error_that_no_user_can_fix_stays_what_it_is(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(files.os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        files.atomic_write(tmp_path / "file", "new")


def test_a_file_where_a_directory_is_needed_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file stands where a directory is needed") as caught:
        files.atomic_write(tmp_path / "file" / "inside", "new")
    assert str(tmp_path / "file") in str(caught.value)


def test_sha256_is_that_of_the_content(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3_000_000)
    assert files.sha256(path) == hashlib.sha256(b"x" * 3_000_000).hexdigest()
    with pytest.raises(UserError, match="no such file"):
        files.sha256(tmp_path / "absent")


def test_publish_moves_a_directory_whole_and_never_overwrites_one(tmp_path: Path):
    temporary, final = tmp_path / "new.tmp", tmp_path / "deep" / "new"
    (temporary / "sub").mkdir(parents=True)
    (temporary / "sub" / "file").write_text("1")
    files.publish(temporary, final)
    assert (final / "sub" / "file").read_text() == "1"
    assert not temporary.exists()
    temporary.mkdir()
    with pytest.raises(UserError, match="it is there already"):
        files.publish(temporary, final)
    assert (final / "sub" / "file").read_text() == "1"


def test_free_bytes_looks_at_the_nearest_parent_that_exists(tmp_path: Path):
    assert files.free_bytes(tmp_path / "not" / "yet") > 0


def test_json_text_has_no_numbers_that_json_has_not() -> None:
    value = {
        "a": [1.5, float("inf"), (float("nan"), -float("inf"))],
        2: np.float32("nan"),
        "tensor": torch.tensor([1.0, np.inf]),
    }
    text = files.json_text(value)
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == {
        "a": [1.5, None, [None, None]],
        "2": None,
        "tensor": [1.0, None],
    }
    assert text.endswith("}\n") and files.json_text({"x": 1}, indent=1) == '{\n "x": 1\n}\n'
