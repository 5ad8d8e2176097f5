"""Grids on a cluster: what is submitted, with stand-ins for SLURM's programs, and a real job of submitit's local executor."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from pkm.errors import UserError
from pkm.experiments.grid import load_grid
from pkm.experiments.jobs import Job, list_jobs
from pkm.run.status import read_status
from pkm.slurm import job_array, launch

submitit = pytest.importorskip("submitit", reason="the extra `slurm` is not installed")

SBATCH = """#!/bin/bash
cp "${@: -1}" "$FAKE/submitted.sbatch"
if [[ -n ${FAKE_REFUSAL:-} ]]; then echo "$FAKE_REFUSAL" >&2; exit 1; fi
echo 'Submitted batch job 4711'
"""
ONE_GPU = launch.Job(nodes=1, gpus_per_node=1, time="2:00:00", partition="gpu", sbatch=("--reservation=week12",))


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
    for name, text in {"sbatch": SBATCH, "srun": "#!/bin/bash\n", "squeue": '#!/bin/bash\ncat "$FAKE/queue"\n'}.items():
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
    waiting = job_array.turns(grid, ONE_GPU)
    assert len(waiting) == 11 and grid[1] not in [turn.job for turn in waiting]
    submitted = job_array.submit(job_array.executor(tmp_path / "logs", ONE_GPU, 4), waiting)
    assert [job.job_id for job in submitted] == [f"4711_{i}" for i in range(11)]
    text = (cluster / "submitted.sbatch").read_text()
    for option in ("array=0-10%4", "gpus-per-node=1", "partition=gpu", "reservation=week12", "requeue", "time=120",
                   "signal=USR2@600", "ntasks-per-node=1", "cpus-per-task=8", "open-mode=append"):  # fmt: skip
        assert f"#SBATCH --{option}\n" in text, text


def test_what_is_queued_already_is_not_submitted_again(jobs, cluster: Path, tmp_path: Path) -> None:
    grid = jobs("table3")
    job_array.submit(job_array.executor(tmp_path / "logs", ONE_GPU, None), job_array.turns(grid, ONE_GPU))
    (cluster / "queue").write_text("4711_0\n4711_2\n9\n")
    assert [turn.job for turn in job_array.turns(grid, ONE_GPU)] == [grid[1], grid[3], grid[4], grid[5]]


def test_a_dry_run_prints_the_same_without_a_cluster(jobs, tmp_path: Path) -> None:
    waiting = job_array.turns(jobs("table3"), ONE_GPU)
    text = "\n".join(job_array.shown(tmp_path / "logs", ONE_GPU, None, waiting))
    assert "#SBATCH --array=0-5%6\n" in text and "#SBATCH --partition=gpu\n" in text
    assert "# 4: table3/position-5 seed 1 -> " in text
    assert not (tmp_path / "logs").exists() and not (tmp_path / "runs").exists()


def test_mistakes_and_refusals_are_told_before_or_in_sbatchs_words(
    jobs, cluster: Path, tmp_path: Path, monkeypatch
) -> None:
    with pytest.raises(UserError, match="is not a time"):
        job_array.turns(jobs("table3"), launch.Job(nodes=1, gpus_per_node=1, time="soon"))
    with pytest.raises(UserError, match="ranks"):
        job_array.turns(jobs("table3"), launch.Job(nodes=1, gpus_per_node=5, time="1:00:00"))
    monkeypatch.setenv("FAKE_REFUSAL", "sbatch: error: invalid partition specified: gpu")
    waiting = job_array.turns(jobs("table3"), ONE_GPU)
    with pytest.raises(UserError, match="invalid partition"):
        job_array.submit(job_array.executor(tmp_path / "logs", ONE_GPU, None), waiting)
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="no SLURM on this machine"):
        job_array.executor(tmp_path / "logs", ONE_GPU, None)


def test_without_submitit_the_extra_is_named(jobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"pip install .*slurm"):
        job_array.executor(tmp_path, ONE_GPU, None)


def test_many_nodes_meet_at_the_first_and_each_starts_its_share(jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "4715", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_JOB_NODELIST": "node[07-08]", "SLURM_NODEID": "1", "SLURM_RESTART_COUNT": "2",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command = job_array.ArrayJob(jobs("table3")[0], ranks=8, nodes=2, grace_seconds=10)._train_command()
    for option in ("--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=node07:14715", "--rdzv-id=4711_3.2",
                   "--rdzv-conf=is_host=0"):  # fmt: skip
        assert option in command


def test_a_job_told_that_its_time_is_over_saves_and_goes_on_in_its_next_turn(jobs, tmp_path: Path) -> None:
    """submitit's local executor: real processes; SIGUSR2 is what SLURM sends before the end."""
    settings = ("optim.steps=400", "log.every_steps=1", "evaluate.every_steps=400", "checkpoint.every_steps=400")
    job = jobs("one_billion_word", settings=settings)[0]
    asked = launch.Job(nodes=1, gpus_per_node=0, time="30", cpus_per_task=1)
    (waiting,) = job_array.turns([job], asked)
    (submitted,) = job_array.submit(job_array.executor(tmp_path / "logs", asked, None, "local"), [waiting])
    metrics, deadline = job.directory / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline and not submitted.done(), submitted.stderr()
        time.sleep(0.01)  # until training has begun: nothing tells of it but the file
    (turn,) = psutil.Process(submitted._process.pid).children()
    turn.send_signal(signal.SIGUSR2)
    assert submitted.result() == "finished"
    assert read_status(job.directory)["step"] == 400
    log = (job.directory / "log.txt").read_text()
    assert log.count("beginning |") == 1 and log.count("going on after step") == 1 and "(SIGUSR1)" in log


def test_a_failed_run_fails_its_job_with_the_reason(jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    (job, *_) = jobs("table3")
    job.directory.mkdir(parents=True)
    (job.directory.parents[2] / "acts.json").write_text('{"": "fail"}')
    monkeypatch.setattr(job_array, "TRAIN", Path(__file__).parents[1] / "support" / "fake_train.py")
    with pytest.raises(RuntimeError, match="the loss is not finite"):
        job_array.ArrayJob(job, ranks=1, nodes=1, grace_seconds=5)()
    # What an earlier turn left is not taken for this one's.
    (job.directory / "status.json").write_text('{"state": "stopped", "step": 3, "reason": "SIGUSR1"}')
    (job.directory.parents[2] / "acts.json").write_text('{"": "error"}')
    with pytest.raises(RuntimeError, match="exit status 2"):
        job_array.ArrayJob(job, ranks=1, nodes=1, grace_seconds=5)()
    assert read_status(job.directory)["state"] == "failed"
    (job.directory.parents[2] / "acts.json").write_text("{}")
    assert job_array.ArrayJob(job, ranks=1, nodes=1, grace_seconds=5)() == "finished"
