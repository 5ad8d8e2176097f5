"""Runs made up on disk, compared: what is shown, what is left out, what the reader is warned of."""

import csv
import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pkm.config.load import dump
from pkm.errors import UserError
from pkm.report import compare
from pkm.report.run_directories import find, read
from tests.support.tiny import tiny_config

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def make(root, tmp_path):
    """Writes a run: its config, and of `steps` trained the records; finished ones have a report."""

    def run(name, state="finished", steps=20, loss=2.0, usage=50.0, status=None, tokens=100, **sections):
        config = tiny_config(name=name, runs=str(root), **{"corpus": {"path": str(tmp_path / "corpus")}, **sections})
        directory = config.directory
        directory.mkdir(parents=True)
        (directory / "config.yaml").write_text(dump(config))
        status = {
            "state": state,
            "step": steps,
            "reason": None,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **(status or {}),
        }
        write(directory / "status.json", status)
        memories = {"2": {"percent": usage, "kl": 0.5}} if config.memory else {}
        records = []
        for step in range(5, steps + 1, 5):
            speed = {"tokens_per_second": 64.0 if step == 5 else 128.0, "peak_memory_bytes": step * 2**28}
            records.append({"kind": "train", "step": step, "loss": loss + 1 / step, "memories": {}, **speed})
            if step % 10 == 0:
                scores = {
                    "perplexity": 100 / step + loss,
                    "loss": math.log(100 / step + loss),
                    "tokens": tokens,
                    "memories": memories,
                }
                records.append({"kind": "valid", "step": step, **scores})
        (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        if state == "finished":
            evaluation = {"perplexity": 10 * loss, "word_perplexity": 20 * loss, "tokens": tokens, "memories": memories}
            write(directory / "report.json", {"evaluation": evaluation, "speed": {"words_per_second": 1234.5}})
        return directory

    return run


def write(path, record):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def shown(runs):
    """label -> {heading: text}"""
    heads = compare.headings(runs)
    return {row[0]: dict(zip(heads, row, strict=True)) for row in compare.rows(runs)}


class TestTable:
    def test_only_settings_that_differ_are_shown(self, make):
        runs = read([make("a"), make("b", optim={"dense": {"lr": 0.02}}, seed=2)])
        assert compare.differing(runs) == ["seed", "optim.dense.lr"]
        assert {run: row["optim.dense.lr"] for run, row in shown(runs).items()} == {"a": "0.01", "b": "0.02"}
        assert compare.shared(runs)["optim.steps"] == "20" and "seed" not in compare.shared(runs)

    def test_a_dense_model_beside_memories_does_not_bring_all_their_settings(self, make):
        runs = read([make("dense", memory=None), make("small"), make("large", memory={"sub_keys": 16, "heads": 4})])
        assert compare.differing(runs) == ["memory", "memory.heads"]
        assert [row["memory"] for row in shown(runs).values()] == ["none", "8^2 at 2", "16^2 at 2"]
        assert [row["memory.heads"] for row in shown(runs).values()] == ["–", "2", "4"]

    def test_what_a_run_measured_is_beside(self, make):
        (row,) = shown(read([make("a")])).values()
        assert (
            row
            | {
                "state": "finished",
                "step": "20 of 20",
                "best valid ppl": "7.00",
                "at step": "20",
                "test ppl": "20.00",
                "test ppl per word": "40.0",
                "usage %": "50.0",
                "KL": "0.50",
                "words/s": "1,234",
                "tokens/s in training": "128",
                "peak GiB": "5.00",
            }
            == row
        )

    def test_the_best_validation_is_of_those_that_measure_what_the_newest_does(self, make):
        directory = make("a")
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        easy = {"kind": "valid", "step": 5, "loss": 0.5, "perplexity": 1.65, "tokens": 10, "documents": 1}
        records = [r | ({"documents": 4} if r["kind"] == "valid" else {}) for r in lines]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [easy, *records]))
        (row,) = shown(read([directory])).values()
        assert (row["best valid ppl"], row["at step"]) == ("7.00", "20")

    def test_speed_measured_alone_goes_before_that_of_the_report(self, make):
        directory = make("a")
        write(directory / "speed.json", {"words_per_second": 9876})
        assert shown(read([directory]))["a"]["words/s"] == "9,876"

    def test_usage_and_kl_of_several_memories_are_means(self, make):
        directory = make("a")
        report = json.loads((directory / "report.json").read_text())
        report["evaluation"]["memories"] = {"1": {"percent": 20.0, "kl": 1.0}, "2": {"percent": 40.0, "kl": 2.0}}
        write(directory / "report.json", report)
        row = shown(read([directory]))["a"]
        assert (row["usage %"], row["KL"]) == ("30.0", "1.50")

    def test_csv_has_every_digit_and_nothing_for_what_is_missing(self, make):
        runs = read([make("a", loss=2.123456789), make("b", state="running", steps=5)])
        a, b = csv.DictReader(compare.csv_text(runs).splitlines())
        assert float(a["test_perplexity"]) == 21.23456789 and a["step"] == "20"
        assert b["test_perplexity"] == b["best_valid_perplexity"] == "" and b["state"] == "running"

    def test_a_run_of_another_version_is_compared_as_it_stands(self, make):
        directory = make("a")
        tree = yaml.safe_load((directory / "config.yaml").read_text())
        tree["optim"]["dense"]["momentum"] = 0.5
        (directory / "config.yaml").write_text(yaml.safe_dump(tree))
        runs = read([directory, make("b")])
        assert runs[0].settings["optim.dense.momentum"] == "0.5"
        assert compare.differing(runs) == []


class TestUnfinished:
    def test_a_running_one_shows_what_there_is_and_says_where_usage_is_from(self, make):
        runs = read([make("done"), make("busy", state="running", steps=10)])
        row = shown(runs)["busy"]
        assert (row["state"], row["step"], row["test ppl"], row["usage %"]) == ("running", "10 of 20", "–", "50.0")
        assert any("newest validation: busy" in line for line in compare.remarks(runs))

    def test_one_whose_process_is_gone_is_interrupted(self, make):
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        runs = read([make("a", state="running", status={"pid": gone.pid})])
        assert runs[0].state == "interrupted"
        runs = read([make("b", state="running", status={"pid": gone.pid, "host": "elsewhere"})])
        assert runs[0].state == "running"

    def test_a_failed_one_says_why_on_one_line(self, make):
        runs = read([make("a", state="failed", steps=5, status={"reason": "disk\nfull | sorry"})])
        assert "| failed: disk full \\| sorry |" in compare.markdown(runs)

    def test_one_that_has_only_settings_is_not_begun(self, make):
        directory = make("a", steps=0)
        for file in ("status.json", "report.json", "metrics.jsonl"):
            (directory / file).unlink()
        row = shown(read([directory]))["a"]
        assert (row["state"], row["step"], row["best valid ppl"]) == ("not begun", "0 of 20", "–")

    def test_a_record_that_is_being_written_is_left_out(self, make):
        directory = make("a", state="running")
        with (directory / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "valid", "st')
        assert read([directory])[0].step == 20

    def test_a_report_of_before_a_run_was_made_longer_is_not_shown(self, make):
        directory = make("a")
        write(directory / "status.json", {"state": "running", "host": "elsewhere"})
        assert shown(read([directory]))["a"]["test ppl"] == "–"


class TestRemarks:
    def test_runs_of_different_corpora_are_told_apart(self, make):
        a, b = make("a"), make("b")
        for directory, corpus in ((a, "1111"), (b, "2222")):
            write(directory / "checkpoints/step-0000020/manifest.json", {"record": {"corpus": corpus}})
        (remark,) = compare.remarks(read([a, b]))
        assert "cannot be compared" in remark and "1111: a; 2222: b" in remark

    def test_a_corpus_that_moved_is_the_same(self, make, tmp_path):
        write(tmp_path / "corpus/manifest.json", {"fingerprint": "1111"})
        write(tmp_path / "moved/manifest.json", {"fingerprint": "1111"})
        runs = read([make("a"), make("b", corpus={"path": str(tmp_path / "moved")})])
        assert [run.corpus for run in runs] == ["1111", "1111"] and compare.remarks(runs) == []

    def test_scores_on_different_texts_are_told_apart(self, make):
        runs = read([make("a"), make("b", tokens=200)])
        assert len(compare.remarks(runs)) == 2
        assert all("100 tokens: a; 200 tokens: b" in remark for remark in compare.remarks(runs))


class TestFinding:
    def test_runs_are_found_by_path_name_glob_and_folder_each_once(self, make, root):
        paths = [make(name) for name in ("x", "sweep/one", "sweep/two", "sweep/deep/three")]
        x, one, two, three = paths
        assert find([str(x), "x"], root) == [x]
        assert find(["sweep/t*"], root) == [two]
        assert find([f"{root}/sweep/[ot]*"], root) == [one, two]
        assert find(["sweep"], root) == [three, one, two]

    def test_one_that_is_not_there_is_named_with_the_nearest(self, make, root):
        make("quickstart"), make("sweep/one")
        with pytest.raises(UserError, match=r"no run is called 'quikstart'(.|\n)*did you mean quickstart\?"):
            find(["quikstart"], root)
        with pytest.raises(UserError, match=r"'zzz'(.|\n)*holds quickstart, sweep/one"):
            find(["zzz"], root)
        with pytest.raises(UserError, match=r"train one first"):
            find(["x"], root / "empty")

    def test_what_was_exported_is_no_run(self, make, root):
        run, exported = make("sweep/run"), make("sweep/exported")
        (exported / "model.safetensors").touch()
        assert find(["sweep"], root) == [run]
        with pytest.raises(UserError, match="exported is there, but no run's directory"):
            find([str(exported)], root)

    def test_labels_are_as_short_as_tells_them_apart(self, make):
        assert [run.label for run in read([make("s1/a"), make("s1/b")])] == ["a", "b"]
        assert [run.label for run in read([make("s2/a"), make("s3/a")])] == ["s2/a", "s3/a"]


class TestCurves:
    def test_places_are_steps_tokens_or_minutes_without_pauses(self, make):
        (run,) = read([make("a")])
        loss = [2 + 1 / step for step in (5, 10, 15, 20)]
        expected = {"step": [5, 10, 15, 20], "tokens": [320e-6, 640e-6, 960e-6, 1280e-6]}
        # 64 tokens a step: 5 steps at 64 tokens/s, the others at 128.
        expected["time"] = [5 / 60, 7.5 / 60, 10 / 60, 12.5 / 60]
        for over, places in expected.items():
            found = compare.points(run, "train", over, lambda record: record["loss"])
            assert found == [pytest.approx(pair) for pair in zip(places, loss, strict=True)]

    def test_values_that_are_not_finite_are_left_out(self, make):
        directory = make("a")
        text = (directory / "metrics.jsonl").read_text()
        (directory / "metrics.jsonl").write_text(text + '{"kind": "train", "step": 21, "loss": null}\n')
        (run,) = read([directory])
        assert len(compare.points(run, "train", "step", lambda record: record["loss"])) == 4

    def test_a_page_holds_table_curves_and_settings_and_asks_for_nothing_else(self, make):
        pytest.importorskip("matplotlib")
        runs = read([make("a"), make("dense", memory=None), make("busy", state="running", steps=10)])
        page = compare.html(runs, "tokens")
        assert page.count("<svg") == 3 and "prefers-color-scheme: dark" in page
        assert "test ppl per word" in page and "optim.batch_tokens" in page
        assert not re.findall(r"(?:src|href)=\"(?!#|data:)|url\((?!#|&)|@import|<script", page)

    def test_a_plot_without_anything_is_said_in_words(self, make):
        pytest.importorskip("matplotlib")
        drawn, lacking = compare.plots(read([make("a", memory=None)]), "step")
        assert len(drawn) == 2 and lacking == [
            "Memory usage in validation, in percent of the slots: nothing to draw, no run has measured it yet."
        ]

    def test_a_run_has_the_same_colour_in_every_plot(self, make):
        pytest.importorskip("matplotlib")
        drawn, _ = compare.plots(read([make("dense", memory=None), make("a")]), "step")
        second = compare.COLOURS[1][0]
        assert second in drawn[2].svg and compare.COLOURS[0][0] not in drawn[2].svg.split("</style>")[1]


def test_the_program_prints_a_table_and_writes_what_was_asked(make, root, tmp_path):
    make("a"), make("b", seed=2)
    page, table = tmp_path / "out/page.html", tmp_path / "out/table.csv"
    command = [
        sys.executable,
        "scripts/compare.py",
        "a",
        "b",
        "--runs",
        str(root),
        "--html",
        str(page),
        "--csv",
        str(table),
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\| run +\| state +\| step +\| seed \|", done.stdout, re.M)
    assert page.read_text().startswith("<!doctype html>") and table.read_text().startswith(
        "run,state,reason,step,seed,"
    )
    done = subprocess.run(
        [*command[:2], "c", "--runs", str(root)], capture_output=True, text=True, cwd=REPOSITORY, env=environment
    )
    assert done.returncode == 2 and "no run is called 'c'" in done.stderr and "Traceback" not in done.stderr
