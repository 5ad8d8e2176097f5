"""Which runs grids ask for, and what is known of them on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pkm.experiments.grid import load_grid
from pkm.experiments.jobs import list_jobs
from pkm.experiments.task import Progress


@pytest.fixture
def smoke(tiny_corpus_path: Path, tmp_path: Path):
    def load(*names: str):
        settings = [f"corpus.path={tiny_corpus_path}", f"runs={tmp_path}/runs"]
        return [load_grid(name, "smoke", settings) for name in names]

    return load


def test_a_cell_that_two_tables_share_is_one_run(smoke) -> None:
    jobs = list_jobs(smoke("table2", "table3", "table4"), [1])
    shared = [job for job in jobs if len(job.cells) == 3]
    assert [job.cells for job in shared] == [
        ["table2/512x512-batchnorm", "table3/position-5", "table4/product-512x512"]
    ]
    assert len(jobs) == 13 + 6 + 12 - 6 - 1
    assert len({job.directory for job in jobs}) == len(jobs)
    assert shared[0].timed and not next(job for job in jobs if job.cells == ["table2/no-memory"]).timed


def test_all_cells_of_the_first_seed_come_before_those_of_the_second_and_untrained_ones_have_one_seed(smoke) -> None:
    jobs = list_jobs(smoke("table4"), [1, 2])
    assert [job.config.seed for job in jobs] == [1] * 12 + [2] * 9
    assert all(job.trained for job in jobs[12:])
    assert sum(not job.trained for job in jobs) == 3


def test_progress_is_read_on_from_where_it_was_and_anew_where_a_run_went_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    progress = Progress()
    progress.read(tmp_path)
    assert progress.step == 0

    def record(step: int, speed: float) -> str:
        return json.dumps({"kind": "train", "step": step, "loss": 1.5, "tokens_per_second": speed}) + "\n"

    path.write_text(record(1, 5.0) + record(10, 100.0) + record(20, 120.0)[:9])
    progress.read(tmp_path)
    assert (progress.step, progress.loss, progress.tokens_per_second) == (10, 1.5, 100.0)
    path.write_text(record(1, 5.0) + record(10, 100.0) + record(20, 120.0) + json.dumps({"kind": "valid", "step": 20}))
    progress.read(tmp_path)
    assert (progress.step, progress.tokens_per_second) == (20, 120.0)
    path.write_text(record(1, 5.0) + record(10, 80.0))
    progress.read(tmp_path)
    assert progress.step == 10
