"""Grids on a cluster: what is submitted, with stand-ins for SLURM's programs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from pkm.errors import UserError
from pkm.experiments.grid import load_grid
from pkm.experiments.jobs import Job, list_jobs
from pkm.slurm import job_array, launch

SBATCH = """#!/bin/bash
cp "${@: -1}" "$FAKE/submitted.sbatch"
if [[ -n ${FAKE_REFUSAL:-} ]]; then echo "$FAKE_REFUSAL" >&2; exit 1; fi
echo 4711
"""
ONE_GPU = launch.Job(
    nodes=1, gpus_per_node=1, time="2:00:00", partition="gpu", sbatch=("--reservation=week12",), doctor=False
)


@pytest.fixture
def jobs(tiny_corpus_path: Path, tmp_path: Path):
    def load(*names: str, settings: tuple[str, ...] = ()) -> list[Job]:
        settings = (f"corpus.path={tiny_corpus_path}", f"runs={tmp_path}/runs", *settings)
        return list_jobs([load_grid(name, "smoke", settings) for name in names], [1])

    return load


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its programs; `queue` lists what waits or runs."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "queue").touch()
    for name, text in {"sbatch": SBATCH, "squeue": '#!/bin/bash\ncat "$FAKE/queue"\n'}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_what_is_not_finished_is_submitted_as_one_array(jobs, cluster: Path, tmp_path: Path) -> None:
    grid = jobs("table4")
    done = grid[1].directory
    done.mkdir(parents=True)
    (done / "status.json").write_text(json.dumps({"state": "finished", "step": 20}))
    (done / "report.json").write_text('{"evaluation": {}}')
    (done / "speed.json").write_text(json.dumps({"trained": True}))
    waiting = job_array.waiting(grid, ONE_GPU)
    assert len(waiting) == 11 and grid[1] not in waiting
    assert job_array.submit(waiting, ONE_GPU, tmp_path / "logs", 4) == "4711"
    assert json.loads((waiting[2].directory / "slurm.json").read_text()) == {"job": "4711_2"}
    text = (cluster / "submitted.sbatch").read_text()
    for option in (
        "array=0-10%4", "gpus-per-node=1", "partition=gpu", "reservation=week12", "requeue", "time=2:00:00",
        "signal=B:USR1@600", "ntasks-per-node=1", "cpus-per-task=8", "open-mode=append", "job-name=reproduce",
        f"output={tmp_path}/logs/%A_%a.log",
    ):  # fmt: skip
        assert f"#SBATCH --{option}\n" in text, text


def test_each_job_of_an_array_does_the_work_of_its_number(jobs, tmp_path: Path) -> None:
    """The file itself, with a stand-in for python."""
    grid = jobs("table4")
    untrained = next(number for number, job in enumerate(grid) if not job.trained)
    (tmp_path / "array.sbatch").write_text(job_array.script(grid, ONE_GPU, tmp_path / "logs", None))
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    for number in (0, untrained):
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": str(number)}
        command = ["bash", str(tmp_path / "array.sbatch")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        flags = ["--speed"] if number == untrained else ["--train", "--speed"]
        assert done.stdout.splitlines() == [
            "-m", "pkm.slurm.turn", "--ranks", "1", "--grace", "570", *flags, str(grid[number].file),
            *grid[number].arguments, "max_minutes=105",
        ]  # fmt: skip


def test_a_finished_run_is_submitted_to_be_asked_for_facts_where_a_table_shows_its_recall(jobs, tmp_path: Path) -> None:
    job = jobs("table3")[0]
    job.directory.mkdir(parents=True)
    (job.directory / "status.json").write_text(json.dumps({"state": "finished", "step": 20}))
    (job.directory / "report.json").write_text('{"step": 20, "evaluation": {}}')
    job.recall = True
    assert job_array.waiting([job], ONE_GPU) == [job]
    assert "--train --facts" in job_array.script([job], ONE_GPU, tmp_path / "logs", None)
    (job.directory / "facts.json").write_text('{"step": 20}')
    assert job_array.waiting([job], ONE_GPU) == []


def test_one_run_alone_is_no_array(jobs, cluster: Path, tmp_path: Path) -> None:
    job_array.submit(jobs("table3")[:1], ONE_GPU, tmp_path / "logs", None)
    assert "--array" not in (cluster / "submitted.sbatch").read_text()
    (cluster / "queue").write_text("4711\n")
    assert job_array.waiting(jobs("table3")[:1], ONE_GPU) == []


def test_what_is_queued_already_is_not_submitted_again(jobs, cluster: Path, tmp_path: Path) -> None:
    grid = jobs("table3")
    job_array.submit(job_array.waiting(grid, ONE_GPU), ONE_GPU, tmp_path / "logs", None)
    (cluster / "queue").write_text("4711_0\n4711_2\n9\n")
    assert job_array.waiting(grid, ONE_GPU) == [grid[1], grid[3], grid[4], grid[5]]


def test_the_file_names_each_run_and_is_made_without_a_cluster(jobs, tmp_path: Path) -> None:
    waiting = job_array.waiting(jobs("table3"), ONE_GPU)
    text = job_array.script(waiting, ONE_GPU, tmp_path / "logs", None)
    assert "#SBATCH --array=0-5\n" in text and "#SBATCH --partition=gpu\n" in text
    (line,) = [line for line in text.splitlines() if line.startswith("4) ")]
    assert "# table3/position-5" in line and f"seed 1 -> {waiting[4].directory}" in line
    assert not (tmp_path / "logs").exists() and not (tmp_path / "runs").exists()


def test_mistakes_and_refusals_are_told_before_or_in_sbatchs_words(
    jobs, cluster: Path, tmp_path: Path, monkeypatch
) -> None:
    with pytest.raises(UserError, match="is not a time"):
        job_array.waiting(jobs("table3"), launch.Job(nodes=1, gpus_per_node=1, time="soon"))
    with pytest.raises(UserError, match="ranks"):
        job_array.waiting(jobs("table3"), launch.Job(nodes=1, gpus_per_node=5, time="1:00:00"))
    monkeypatch.setenv("FAKE_REFUSAL", "sbatch: error: invalid partition specified: gpu")
    waiting = job_array.waiting(jobs("table3"), ONE_GPU)
    with pytest.raises(UserError, match="invalid partition"):
        job_array.submit(waiting, ONE_GPU, tmp_path / "logs", None)
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="no sbatch on this machine"):
        job_array.submit(waiting, ONE_GPU, tmp_path / "logs", None)
