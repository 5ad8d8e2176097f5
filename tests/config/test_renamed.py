"""Settings under their old name load as what they are called now, with one line that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pkm.config.load import Resolved
from pkm.config.load import load as load_file
from pkm.config.renamed import RENAMED
from pkm.config.schema import Config, load
from pkm.config.schema_node import SchemaNode
from pkm.errors import UserErrors
from pkm.experiments.grid import run_name
from tests.support.tiny import MEMORY, MINIMAL, loaded

# As earlier versions took them, and the same in today's words.
OLD = {
    "optim.dense.fused=apex": "optim.dense.implementation=apex",
    "optim.values.update=fused": "optim.values.update=in_backward",
    "optim.max_skipped=3": "optim.max_consecutive_skips=3",
    "parallel.batch_norm=each rank": "parallel.sync_batch_norm=false",
    "parallel.batch_norm=all ranks": "parallel.sync_batch_norm=true",
    "checkpoint.async=true": "checkpoint.in_background=true",
}


def as_file(setting: str, path: Path) -> Path:
    """The setting as the third line of a file of its own."""
    key, _, value = setting.partition("=")
    first, *middle, last = key.split(".")
    inner = f"{last}: '{value}'" if " " in value else f"{last}: {value}"
    for part in reversed(middle):
        inner = f"{part}: {{{inner}}}"
    path.write_text(f"# old\n{first}:\n  {inner}\n")
    return path


def resolved(path: Path, *overrides: str) -> tuple[Resolved[Any], list[str]]:
    said: list[str] = []
    return load_file(path, overrides, Config, say=said.append), said


@pytest.mark.parametrize(("old", "new"), OLD.items())
class TestEveryOldName:
    def test_loads_on_the_command_line(self, tmp_path: Path, old: str, new: str) -> None:
        plain = tmp_path / "c.yaml"
        plain.write_text(MINIMAL + MEMORY)
        found, said = resolved(plain, old)
        assert found.config == loaded(tmp_path, MINIMAL + MEMORY, new)
        assert len(said) == 1 and said[0].startswith(f"argument {old!r}: ") and new.split("=")[0] in said[0]

    def test_loads_in_a_file_and_in_its_base_file_and_says_the_line(self, tmp_path: Path, old: str, new: str) -> None:
        base = as_file(old, tmp_path / "old.yaml")
        top = tmp_path / "top.yaml"
        top.write_text("base: old.yaml\n" + MINIMAL + MEMORY)
        found, said = resolved(top)
        assert found.config == loaded(tmp_path, MINIMAL + MEMORY, new)
        assert len(said) == 1 and said[0].startswith(f"{base}:3: ")
        assert said[0].endswith((f"is now {new.partition('=')[0]}", f"is now {new}"))

    def test_is_overridden_by_a_later_one_of_either_name(self, tmp_path: Path, old: str, new: str) -> None:
        default = loaded(tmp_path, MINIMAL + MEMORY)
        key, old_key = new.split("=")[0], old.split("=")[0]
        value: Any = default
        for part in key.split("."):
            value = getattr(value, part)
        back = f"{key}={str(value).lower()}"
        assert loaded(tmp_path, MINIMAL + MEMORY, old, back) == default
        assert loaded(tmp_path, MINIMAL + MEMORY, back, old) == loaded(tmp_path, MINIMAL + MEMORY, new)
        assert key == old_key or old_key not in load(tmp_path / "c.yaml", [old]).yaml

    def test_leaves_the_name_of_a_cells_run_as_it_was(self, tmp_path: Path, old: str, new: str) -> None:
        made = loaded(tmp_path, MINIMAL + MEMORY, new)
        assert run_name(made) == run_name(loaded(tmp_path, MINIMAL + MEMORY, old))


def test_the_run_of_a_cell_has_the_name_that_the_first_version_gave_it(tmp_path: Path) -> None:
    changed = ("optim.values.update=fused", "optim.dense.fused=apex", "optim.max_skipped=3")
    made = loaded(tmp_path, MINIMAL + MEMORY, "corpus.path=prepared/none", *changed, "parallel.batch_norm=each rank")
    assert run_name(made) == "6x64-64x64-layer5-h4k32-batch-seed1-b96eec0b"


def test_no_setting_has_an_old_name_and_every_new_one_is_there() -> None:
    keys = set(SchemaNode.by(Config).keys())
    for renamed in RENAMED:
        assert renamed.new in keys and (renamed.old == renamed.new or renamed.old not in keys)
    assert {old.partition("=")[0] for old in OLD} == {renamed.old for renamed in RENAMED}


def test_a_setting_under_both_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserErrors, match=r"c.yaml:3: optim.max_skipped is the old name of optim.max_consecutive_skips"):
        loaded(tmp_path, MINIMAL.replace("batch_tokens:", "max_consecutive_skips: 4, max_skipped: 3, batch_tokens:"))


def test_a_wrong_value_of_an_old_name_is_refused_under_the_new_one_at_its_line(tmp_path: Path) -> None:
    with pytest.raises(UserErrors, match=r"c.yaml:5: parallel.sync_batch_norm must be true or false; found some ranks"):
        loaded(tmp_path, MINIMAL + "parallel: {batch_norm: some ranks}\n")


def test_the_line_is_shown_once_and_by_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, times in (("1", 0), ("0", 1)):
        folder = tmp_path / rank
        folder.mkdir()
        monkeypatch.setenv("RANK", rank)
        for _ in range(2):
            loaded(folder, MINIMAL + "checkpoint: {async: yes}\n")
        said = f"warning: {folder}/c.yaml:5: checkpoint.async is now checkpoint.in_background\n"
        assert capsys.readouterr().err == said * times
