"""The page of one run: trained for real, or with records of an earlier version."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pkm.config.load import dump
from pkm.report import single
from pkm.report.run_directories import read
from tests.support.tiny import tiny_config

REPOSITORY = Path(__file__).parents[2]


def test_a_page_shows_curves_usage_samples_and_settings_and_asks_for_nothing_else(train):
    *_, directory = train(evaluate={"every_steps": 5})
    (run,) = read([directory])
    page = single.html(run, "tokens")
    titles = re.findall(r"<figcaption>([^,<]*)", page)
    assert {"Loss", "Validation perplexity", "Memory usage", "Learning rates", "Gradient norms"} <= set(titles)
    assert "The memory&#39;s output over its residual stream" in page.replace("'", "&#39;")
    samples = [record["sample"]["text"] for record in run.of_kind("valid")]
    assert page.count('class="sample"') == len(samples) == 4
    assert "optim.batch_tokens" in page and "millions of tokens trained on" in page
    assert ("tokens trained on", "1,280") in single.numbers(run)
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)|url\((?!#|&)|@import|<script", page)


def test_many_samples_are_shown_evenly_from_the_first_to_the_last(train):
    *_, directory = train(evaluate={"every_steps": 1, "sample": 2})
    steps = [step for step, _, _ in single.samples(*read([directory]))]
    assert len(steps) == single.SAMPLES and steps[0] == 1 and steps[-1] == 20 and steps == sorted(set(steps))


@pytest.fixture
def old(tmp_path):
    """A run of an earlier version, that logged less, with text that a page must not take for its own."""
    config = tiny_config(name="old", runs=str(tmp_path / "runs"))
    config.directory.mkdir(parents=True)
    (config.directory / "config.yaml").write_text(dump(config))
    records = [
        {"kind": "train", "step": 5, "loss": 2.0, "memories": {"2": {"usage": 50.0, "kl": 0.1}}},
        {"kind": "valid", "step": 5, "loss": 1.5, "perplexity": 4.5, "memories": {"2": {"percent": 40.0, "kl": 0.2}}},
        {"kind": "valid", "step": 9, "loss": 1.4, "perplexity": 4.1, "sample": {"prompt": "<b>", "text": "<script>"}},
    ]
    (config.directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    group = {"facts": 10, "nll": 7.125, "nll_error": None, "nll_per_token": 3.5, "exact": 12.5}
    (config.directory / "facts.json").write_text(json.dumps({"asked": 10, "groups": {"never": group}}))
    return config.directory


def test_what_an_earlier_version_did_not_log_is_left_out(old):
    (run,) = read([old])
    page = single.html(run, "step")
    assert "Learning rates" not in page and "Memory usage" in page
    assert single.memories(run) == [] and "4.10" in dict(single.numbers(run))["best validation perplexity (step 9)"]
    assert "&lt;script&gt;" in page and "<script>" not in page
    assert single.recall(run.facts) == [["never", "10", "7.12", "3.500", "12.5"]]


def test_the_program_writes_the_page_into_the_run_and_names_one_run_only(old):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}

    def go(*arguments):
        command = [sys.executable, "scripts/report.py", "--runs", str(old.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)

    done = go("old")
    assert done.returncode == 0, done.stderr
    assert (old / "report.html").read_text().startswith("<!doctype html>") and str(old / "report.html") in done.stdout
    assert go("none").returncode == 2
