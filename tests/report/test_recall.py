"""Recall of runs made up on disk, side by side."""

import json
import statistics

import pytest

from pkm.config.load import dump
from pkm.report import compare
from pkm.report.recall import recall_of
from pkm.report.run_directories import read
from tests.support.tiny import tiny_config


@pytest.fixture
def make(tmp_path):
    def run(name, never=None, once=None, **sections):
        config = tiny_config(name=name, runs=str(tmp_path / "runs"), **sections)
        config.directory.mkdir(parents=True)
        (config.directory / "config.yaml").write_text(dump(config))
        if never is not None:
            groups = {
                "never": {"nll": never, "nll_per_token": never / 2, "exact": 1.0},
                "once": {"nll": once, "nll_per_token": once / 2, "exact": 2.0},
            }
            (config.directory / "facts.json").write_text(json.dumps({"asked": 30, "groups": groups}))
        return config.directory

    return run


def test_a_memory_and_none_differ_by_what_they_differ_seed_by_seed(make):
    dense, gains = (10.0, 14.0, 12.0), (1.0, 1.1, 0.9)
    runs = [make(f"d{i}", 15.0, x, memory=None, seed=i) for i, x in enumerate(dense)]
    runs += [make(f"m{i}", 15.0, x - gain, seed=i) for i, (x, gain) in enumerate(zip(dense, gains, strict=True))]
    table = recall_of(read(runs))
    assert table.headings[0] == "read in training" and [h[-8:] for h in table.headings[1:3]] == ["(3 runs)", "(3 runs)"]
    rows = {row[0]: row[1:] for row in table.rows}
    # Seeds differ by 2, but the pairs by 0.1: t of 2 degrees of freedom, 4.303 * 0.1 / sqrt(3) = 0.25.
    assert rows["once: nats an answer"] == [
        "12.00 ± 2.00",
        f"11.00 ± {statistics.stdev((9, 12.9, 11.1)):.2f}",
        "-1.00 (-1.25 to -0.75)",
    ]
    assert rows["once: nats a token fewer than never"][2] == "+0.50 (+0.38 to +0.62)"
    assert rows["never: nats an answer"][2].replace("-", "+") == "+0.00 (+0.00 to +0.00)"
    assert rows["once: exact %"] == ["2.00 ± 0.00", "2.00 ± 0.00", rows["once: exact %"][2]]
    text = compare.markdown(read(runs))
    assert "## Recall of facts" in text and "-1.00 (-1.25 to -0.75)" in text
    assert "-1.00 (-1.25 to -0.75)" in compare.html(read(runs), "step")


def test_one_run_each_has_a_difference_without_an_interval_and_runs_never_asked_no_table(make):
    asked = [make("a", 15.0, 14.0, memory=None), make("b", 15.0, 13.5)]
    silent = make("c", seed=4)
    assert recall_of(read([silent])) is None and "Recall" not in compare.markdown(read([silent]))
    rows = {row[0]: row[1:] for row in recall_of(read([*asked, silent])).rows}
    assert rows["once: nats an answer"] == ["14.00", "13.50", "-0.50"]


def test_settings_that_make_no_other_model_are_no_other_column(make):
    runs = [make("a", 15.0, 14.0, seed=1), make("b", 15.0, 13.0, seed=2, threads=3, log={"every_steps": 7})]
    assert recall_of(read(runs)).headings == ["read in training", "all (2 runs)"]
