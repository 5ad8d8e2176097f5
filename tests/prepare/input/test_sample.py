"""pkm/prepare/input/sample.py: the sample corpus comes out of a wheel, once, and is what it should be."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from pkm.errors import UserError
from pkm.prepare.input import sample


@pytest.fixture
def index(monkeypatch):
    """A stand-in for pip: puts a wheel with `content` where it is asked to, or fails."""
    calls = []

    def serve(content: bytes | None, inside: str = sample.INSIDE):
        def run(command, **_):
            calls.append(command)
            if content is None:
                return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: No matching distribution found\n")
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "gensim-4.4.0-any.whl", "w") as wheel:
                wheel.writestr(inside, content)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(sample.subprocess, "run", run)
        return calls

    return serve


def test_it_is_fetched_once_and_checked(tmp_path: Path, index, monkeypatch):
    content = b"article one\narticle two\n"
    monkeypatch.setattr(sample, "SHA256", sample.sha256(write(tmp_path / "expected", content)))
    calls = index(content)
    path = tmp_path / "raw" / "sample.cor"
    assert sample.fetch(path).read_bytes() == content
    sample.fetch(path)
    assert len(calls) == 1
    path.write_bytes(b"damaged")
    assert sample.fetch(path).read_bytes() == content
    assert len(calls) == 2


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_where_it_cannot_be_fetched_the_error_says_how_to_use_ones_own_text(tmp_path: Path, index):
    calls = index(None)
    with pytest.raises(UserError, match="No matching distribution") as caught:
        sample.fetch(tmp_path / "sample.cor")
    assert "your own text" in str(caught.value) and "data/README.md" in str(caught.value)
    # Any wheel will do: one for another platform was asked for, too.
    assert len(calls) == 2 and any(option.startswith("--platform") for option in calls[1])


@pytest.mark.parametrize(("inside", "message"), [("other", "holds no"), (sample.INSIDE, "not the one")])
def test_another_content_is_refused_and_not_kept(tmp_path: Path, index, inside, message):
    index(b"something else", inside)
    with pytest.raises(UserError, match=message):
        sample.fetch(tmp_path / "sample.cor")
    assert not (tmp_path / "sample.cor").exists()
