"""scripts/prepare.py and data/*.yaml: what people type, and what they read."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from pkm.config.load import load
from pkm.errors import UserErrors
from pkm.prepare.settings import PrepareConfig, impossible
from tests.prepare.conftest import made_articles, write_jsonl

ROOT = Path(__file__).parents[2]
CONFIG = """
name: mine
sources: [{path: in.jsonl}]
held_out: {valid: 4, test: 3}
filters: {language: null}
subwords: {codes: 100}
workers: 1
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch, capsys):
    """Runs the program in a directory of its own: (exit status, what it printed)."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(CONFIG)
    write_jsonl(Path("in.jsonl"), made_articles(40))

    def program(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["prepare.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "scripts" / "prepare.py"), run_name="__main__")
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out + printed.err

    return program


def test_settings_may_stand_before_and_after_options_and_name_an_item_of_a_list(run):
    Path("in.jsonl").rename("other.jsonl")
    code, said = run("mine.yaml", "sources.0.path=other.jsonl", "--dry-run", "name=theirs")
    assert code == 0 and "plan: prepared/theirs" in said and "1 files" in said


@pytest.mark.parametrize("path", sorted((ROOT / "data").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_corpus_is_a_config_named_after_its_file(path):
    config = load(path, [], PrepareConfig, impossible).config
    assert config.name == path.stem
    assert config.directory == Path("prepared") / path.stem


def test_the_papers_corpus_has_the_papers_settings():
    config = load(ROOT / "data" / "ccnews.yaml", [], PrepareConfig, impossible).config
    assert (config.subwords.codes, config.held_out.valid, config.held_out.test) == (60_000, 5000, 5000)
    assert config.filters.language == "en" and not config.tokenizer.escape


def test_settings_that_contradict_each_other_are_named_at_once(tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_text(CONFIG)
    wrong = ["subwords.codes_file=c", "executor=slurm", "filters.min_words=9", "filters.max_words=3"]
    with pytest.raises(UserErrors) as caught:
        load(path, wrong, PrepareConfig, impossible)
    for key in ("subwords.vocab_file", "slurm.partition", "filters.max_words"):
        assert key in str(caught.value) or key.rpartition(".")[2] in str(caught.value)
    assert len(caught.value.errors) == 3


@pytest.mark.parametrize(
    ("specials", "named"),
    [("[<a>, news]", "news may be a word"), ("[new@@]", "new@@ may be a word"), ("[<a>, <b>, <a>]", "<a> is there already"),
     ("[<unk>]", "<unk> is there already")],
)  # fmt: skip
def test_marks_that_a_text_could_hold_are_refused_before_anything_is_read(run, specials, named):
    status, printed = run("mine.yaml", f"subwords.specials={specials}")
    assert status == 2 and named in printed and "subwords.specials" in printed
    assert not Path("prepared").exists()


def test_given_codes_may_go_with_any_mark_that_is_not_among_them(run):
    run("mine.yaml")
    given = [f"subwords.{name}_file=prepared/mine/{name}" for name in ("codes", "vocab")]
    assert run("mine.yaml", "name=other", "subwords.specials=[qqq]", *given)[0] == 0


def test_a_dry_run_shows_files_sizes_time_and_disk_and_does_nothing(run):
    status, printed = run("mine.yaml", "--dry-run")
    assert status == 0
    for part in ("jsonl", "1 files", "1 tasks", "of disk meanwhile", "are free"):
        assert part in printed
    assert sorted(path.name for path in Path().iterdir()) == ["in.jsonl", "mine.yaml"]


def test_a_preparation_shows_progress_and_a_summary_and_the_next_call_that_it_is_done(run):
    status, printed = run("mine.yaml")
    assert status == 0
    for part in ("reading and filtering: 100%", "encoding: 100%", "words/CPU s", "prepared in", "fingerprint"):
        assert part in printed
    status, printed = run("mine.yaml")
    assert status == 0 and "prepared already" in printed and "encoding" not in printed


def test_what_is_left_out_is_shown_before_after_and_in_the_statistics(run):
    os.mkdir("d")
    os.rename("in.jsonl", "d/in.jsonl")
    Path("d/in.jsonl.bak").write_text("x")
    for arguments in (["mine.yaml", "sources=[{path: d}]", "--dry-run"], ["mine.yaml", "sources=[{path: d}]"]):
        status, printed = run(*arguments)
        assert status == 0 and printed.count("left out: 1 .bak") == (1 if "--dry-run" in arguments else 2)
    assert "left out: 1 .bak" in run("--stats", "prepared/mine")[1]


def test_a_vocabulary_of_other_text_is_warned_of_after_preparing_and_in_the_statistics(run):
    run("mine.yaml")
    shown = run("--stats", "prepared/mine")[1]
    assert "<unk>" in shown and "of the tokens of train" not in shown
    write_jsonl(Path("upper.jsonl"), [text.upper() for text in made_articles(40)])
    given = [f"subwords.{name}_file=prepared/mine/{name}" for name in ("codes", "vocab")]
    status, printed = run("mine.yaml", "sources=[{path: upper.jsonl}]", "name=other", *given)
    for shown in (printed, run("--stats", "prepared/other")[1]):
        line = next(line for line in shown.splitlines() if line.startswith("warning: "))
        assert "of the tokens of train" in line and "codes and vocabulary are not of this text" in line
    assert status == 0


def test_lines_are_not_broken_off_a_terminal_and_names_are_no_markup(run):
    folder = "a [bold]long name [x] of a folder " * 6 + "end"
    os.mkdir(folder)
    os.rename("in.jsonl", f"{folder}/in.jsonl")
    Path(folder, os.fsdecode(b"caf\xe9.jsonl")).write_text("broken\n")
    yaml = f"sources=[{{path: '{folder}'}}]"
    status, printed = run("mine.yaml", yaml, "limits.damaged=0.5")
    assert status == 0
    named = next(line for line in printed.splitlines() if "not JSON" in line)
    assert f"{folder}/caf\\xe9.jsonl:1: not JSON: " in named
    assert sum(folder in line for line in printed.splitlines()) >= 2
    status, printed = run("mine.yaml", yaml, "name=other")
    assert status == 2 and f"{folder}/caf\\xe9.jsonl:1" in printed and "Traceback" not in printed


def test_stats_verify_and_show_tell_what_a_corpus_holds(run):
    run("mine.yaml")
    status, printed = run("--stats", "--verify", "prepared/mine")
    assert status == 0
    for part in ("train", "valid", "test", "33", "40 records", "dropped: nothing", "every shard is what it was"):
        assert part in printed
    status, printed = run("--show", "0", "prepared/mine")
    assert status == 0 and made_articles(40)[0].split()[0] in printed
    status, printed = run("--show", "33", "mine.yaml")
    assert status == 2 and "train has 33 documents, counted from 0" in printed


def test_mistakes_end_with_status_2_one_message_and_no_traceback(run):
    for arguments, message in (
        (["absent.yaml"], "absent.yaml"),
        (["mine.yaml", "sources=[{path: absent}]"], "no file or folder 'absent'"),
        (["mine.yaml", "subword.codes=5"], "subwords"),
        (["--stats", "."], "not a prepared corpus"),
    ):
        status, printed = run(*arguments)
        assert (status, message in printed, "Traceback" in printed) == (2, True, False), printed
