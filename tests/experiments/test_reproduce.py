"""scripts/reproduce.py and scripts/speed.py with real runs of a grid of one's own."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pkm.corpus.store import fingerprint_of
from pkm.experiments import workers
from tests.support.tiny import byte_level_corpus_of, corpus_of, tiny_config

SUPPORT = Path(__file__).parents[1] / "support"
GRID = """
title: Three ways
about: A model without a memory, one with, and one that is only timed.
start: {start}
rows: [slots]
columns: [keys]
measures: [{measures}]
cells:
  - {{name: dense, set: [memory=null], paper: {{perplexity: 20.5}}}}
{more}"""
MORE = """
  - {name: flat, set: [memory.keys=flat, memory.sub_keys=null, memory.slots=64], trained: false}
  - {name: exploding, set: [optim.dense.lr=1e30, optim.max_consecutive_skips=2]}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_corpus_path: Path) -> Path:
    """Two grids that share a cell, and a scale."""
    from pkm.config.load import dump

    folder = tmp_path_factory.mktemp("grids")
    log = {"every_steps": 1, "tensorboard": False}
    config = tiny_config(runs=str(folder / "runs"), corpus={"path": str(tiny_corpus_path)}, log=log)
    (folder / "start.yaml").write_text(dump(config))
    (folder / "one.yaml").write_text(GRID.format(start="start.yaml", measures="perplexity", more=""))
    (folder / "two.yaml").write_text(GRID.format(start="start.yaml", measures="perplexity, kwords_per_s", more=MORE))
    (folder / "mine.yaml").write_text("about: As it is.\n")
    return folder


@pytest.fixture
def reproduce(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs scripts/reproduce.py in this process; (exit status, what it printed, and on the error output)."""
    monkeypatch.syspath_prepend(str(SUPPORT.parents[1] / "scripts"))
    main: Callable[[], int] = importlib.import_module("reproduce").main

    def go(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *arguments])
        code = main()
        said = capsys.readouterr()
        return code, said.out, said.err

    def at_scale(*grids: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        return go(*(str(folder / f"{grid}.yaml") for grid in grids), "--scale", str(folder / "mine.yaml"), *options)

    go.mine = at_scale  # type: ignore[attr-defined]
    return go


class TestRuns:
    """In order: what one test leaves, the next goes on with."""

    def test_a_grid_that_was_told_to_stop_has_saved(self, reproduce, folder: Path, monkeypatch) -> None:
        monkeypatch.setattr(workers, "TRAIN", SUPPORT / "interrupted_train.py")
        code, out, _ = reproduce.mine("one")
        assert code == 130
        assert "one/dense seed 1 stopped: SIGTERM, at step 6\n" in out
        assert "the same command goes on" in out
        assert not (folder / "runs/reproduce/mine/report").exists()

    def test_the_next_call_goes_on_past_what_fails_and_reports(self, reproduce, folder: Path) -> None:
        code, out, err = reproduce.mine("one", "two")
        assert code == 1, out + err
        assert "3 runs: 0 finished before, 2 to train" in out and "1 only timed" in out
        assert "one/dense seed 1 started, goes on after step" in out
        assert "two/exploding seed 1 failed: " in out and "2 steps in a row had a loss or gradient that is not" in out
        (dense,) = (folder / "runs/reproduce/mine").glob("*dense*")
        assert "going on after step" in (dense / "log.txt").read_text()
        assert (folder / "runs/reproduce/mine/report/report.html").is_file()
        assert f"{json.loads((dense / 'report.json').read_text())['evaluation']['perplexity']:,.2f}" in out
        assert out.count("words/s (cpu") == 2

    def test_a_cell_that_is_not_trained_has_only_its_speed(self, reproduce, folder: Path) -> None:
        (flat,) = (folder / "runs/reproduce/mine").glob("*flat*")
        assert [path.name for path in flat.iterdir()] == ["speed.json"]
        untrained = json.loads((flat / "speed.json").read_text())
        assert untrained["weights"] == "as initialised" and untrained["trained"] is False
        (dense,) = (folder / "runs/reproduce/mine").glob("*dense*")
        trained = json.loads((dense / "speed.json").read_text())
        assert trained["trained"] is True and trained["weights"].startswith("step ")
        assert trained["words_per_second"] > 0 and trained["tokens_per_second"] >= trained["words_per_second"]
        assert (trained["batch_windows"], trained["context"], trained["precision"]) == (4, 8, "fp32")

    def test_what_is_finished_and_timed_is_left_alone(self, reproduce, folder: Path) -> None:
        (dense,) = (folder / "runs/reproduce/mine").glob("*dense*")
        before = {path: path.stat().st_mtime_ns for path in dense.rglob("*")}
        code, out, _ = reproduce.mine("one")
        assert code == 0 and "1 run: 1 finished before\n" in out
        assert before == {path: path.stat().st_mtime_ns for path in dense.rglob("*")}

    def test_a_report_alone_runs_nothing(self, reproduce, folder: Path, tmp_path: Path) -> None:
        code, out, _ = reproduce.mine(
            "two", options=("--report-only", "--report", str(tmp_path / "here"), "--seeds", "2")
        )
        assert code == 0 and "started" not in out
        assert (tmp_path / "here" / "report.html").is_file()
        assert not list((folder / "runs/reproduce/mine").glob("*seed2*"))

    def test_a_dry_run_says_what_is_finished_and_shared(self, reproduce) -> None:
        code, out, _ = reproduce.mine("one", "two", options=("--dry-run",))
        lines = {line.split()[0]: line for line in out.splitlines() if "/" in line.split(" ")[0]}
        assert code == 0 and "finished; also two/dense" in lines["one/dense"]
        assert "timed already" in lines["two/flat"] and "memory.slots=64" in lines["two/flat"]
        assert "goes on" not in lines["two/exploding"] and "1e+30" in lines["two/exploding"]
        assert "2 runs to train, 1 that are only timed; 1 finished" in out


def test_recall_is_measured_once_of_every_run_that_is_finished(reproduce, folder: Path, tmp_path: Path) -> None:
    said = [
        f"The mayor of {a}{b}ville is now {c}{d} . He was elected ."
        for a in "abc"
        for b in "rst"
        for c in ("An", "Be")
        for d in ("na", "lo")
    ]
    corpus = corpus_of(tmp_path / "facts", train=said[::2] * 2, valid=said[1::8], test=said[1::2])
    (folder / "known.yaml").write_text(GRID.format(start="start.yaml", measures="perplexity, recall", more=""))
    settings = (
        "--set",
        f"corpus={{path: {corpus}, context: 24}}",
        "optim.batch_tokens=96",
        "optim.steps=3",
        f"runs={tmp_path}/runs",
    )
    code, out, _ = reproduce.mine("known", options=(*settings, "--seeds", "2"))
    assert code == 0 and out.count(" facts, recall ") == 2, out
    files = sorted((tmp_path / "runs").rglob("facts.json"))
    found = [json.loads(file.read_text())["groups"] for file in files]
    saved = [groups["never"]["nll_per_token"] - groups["more often"]["nll_per_token"] for groups in found]
    assert f"{statistics.fmean(saved):.3f} ± {statistics.stdev(saved):.3f}" in out
    assert "names, places and numbers asked as the rest of their sentences" in out
    before = files[1].stat().st_mtime_ns
    files[0].unlink()
    code, out, _ = reproduce.mine("known", options=(*settings, "--seeds", "2", "--dry-run"))
    assert out.count("finished, to be asked for facts") == 1
    code, out, _ = reproduce.mine("known", options=(*settings, "--seeds", "2"))
    assert code == 0 and out.count(" facts, recall ") == 1 and "started" not in out
    assert files[0].exists() and files[1].stat().st_mtime_ns == before


class TestRefusals:
    def test_recall_of_ids_without_text_is_refused_before_anything_runs(
        self, reproduce, folder: Path, tmp_path: Path
    ) -> None:
        corpus = byte_level_corpus_of(tmp_path / "ids", **dict.fromkeys(("train", "valid", "test"), ["a b c"] * 9))
        manifest = json.loads((corpus / "manifest.json").read_text())
        manifest["tokenizer"] |= {"library": None, "end": None}
        (corpus / "manifest.json").write_text(json.dumps(manifest | {"fingerprint": fingerprint_of(manifest)}))
        (folder / "known.yaml").write_text(GRID.format(start="start.yaml", measures="perplexity, recall", more=""))
        code, out, err = reproduce.mine("known", options=("--corpus", str(corpus), "--set", f"runs={tmp_path}/runs"))
        assert code == 2 and "nobody knows where a name" in err and "leave recall out" in err
        assert not (tmp_path / "runs").exists() and "started" not in out

    def test_an_unknown_table_or_scale_is_named_with_the_nearest(self, reproduce) -> None:
        assert "did you mean table2?" in reproduce("tabel2", "--scale", "smoke")[2]
        assert "did you mean smoke?" in reproduce("table2", "--scale", "smok")[2]
        assert reproduce("table2", "--scale", "smok")[0] == 2

    def test_a_corpus_that_is_not_prepared_is_refused_before_anything_runs(self, reproduce, tmp_path: Path) -> None:
        runs = ("--set", f"runs={tmp_path}/runs")
        code, out, err = reproduce("table2", "--scale", "smoke", "--corpus", str(tmp_path / "nothing"), *runs)
        assert code == 2 and "scripts/prepare.py" in err and "--corpus" in err
        assert not (tmp_path / "runs").exists() and "started" not in out

    def test_no_seeds_and_more_gpus_than_there_are_are_refused(self, reproduce, tiny_corpus_path: Path) -> None:
        for option in ("--seeds", "--jobs", "--gpus-per-run", "--nodes"):
            code, _, err = reproduce("table2", "--scale", "smoke", option, "0")
            assert code == 2 and f"{option}: 0 is too few" in err
        assert "are too few" not in reproduce("table2", "--scale", "smoke", "--slurm", "--gpus-per-run", "0")[2]
        assert "ranks cannot share" in reproduce(
            "table2", "--scale", "smoke", "--corpus", str(tiny_corpus_path), "--slurm", "--gpus-per-run", "5"
        )[2]  # fmt: skip


def test_every_cell_can_be_run_by_hand_with_the_command_that_is_printed(reproduce, tiny_corpus_path: Path) -> None:
    import shlex

    from pkm.config.schema import load

    code, out, _ = reproduce(
        "table4", "--scale", "smoke", "--corpus", str(tiny_corpus_path), "--commands", "--seeds", "2"
    )
    commands = [shlex.split(line) for line in out.splitlines() if not line.startswith("#")]
    assert code == 0 and len(commands) == 12 + 9
    assert [command[1] for command in commands].count("scripts/speed.py") == 3
    names = [load(command[2], command[3:]).config.name for command in commands]
    assert len(set(names)) == 21 and sum("seed2" in name for name in names) == 9


def test_slurm_is_not_asked_where_nothing_is_to_run(reproduce, tiny_corpus_path: Path, tmp_path: Path) -> None:
    grid = ("table3", "--scale", "smoke", "--corpus", str(tiny_corpus_path), "--set", f"runs={tmp_path}/runs")
    code, out, _ = reproduce(*grid, "--slurm", "--gpus-per-run", "0", "--commands")
    assert code == 0 and out.count("python train.py ") == 6
    code, out, _ = reproduce(*grid, "--slurm", "--report-only")
    assert code == 0 and "not run: every cell" in out
    code, _, err = reproduce(*grid, "--slurm", "--measure-speed-again")
    assert code == 2 and "--measure-speed-again" in err


def test_all_is_every_grid_with_shared_cells_once(reproduce, tiny_corpus_path: Path) -> None:
    code, out, _ = reproduce("all", "--scale", "smoke", "--corpus", str(tiny_corpus_path), "--commands")
    assert code == 0
    assert "# table4/product-1024x1024, speed_memory/product-1024x1024" in out.replace(
        "table2/1024x1024-batchnorm, ", ""
    )
    assert (
        "# table2/512x512-batchnorm, table3/position-5, table4/product-512x512, heads_knn/h4k32, speed_memory/" in out
    )
