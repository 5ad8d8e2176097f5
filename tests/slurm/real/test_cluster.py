"""Jobs of a real SLURM: whatever ends a turn of one, the run goes on, and ends as the same run without SLURM does.

A run that something is to happen to is held (SIGSTOP) at a step, so that it cannot be over before.
"""

import os
import re
import signal

import pytest

from pkm.experiments.grid import load_grid
from pkm.experiments.jobs import list_jobs
from pkm.run.status import read_status
from pkm.slurm import job_array, launch
from tests.slurm.real.cluster import until

STEPS = ("optim.steps=300", "checkpoint.every_steps=50", "evaluate.every_steps=100", "log.tensorboard=false")
ONE_NODE = {
    "nodes": 1, "gpus_per_node": 0, "cpus_per_task": 4, "time": "10", "doctor": False, "venv": launch.environment(),
}  # fmt: skip


class Jobs:
    def __init__(self, cluster, runs):
        self.cluster, self.runs = cluster, runs

    def submit(self, name, *settings, **asked):
        """Submit a run; its job's id."""
        said = "\n".join(
            launch.launch(launch.Job(**ONE_NODE | asked), str(self.runs.settings(name)), [*STEPS, *settings])
        )
        return re.search(r"submitted job (\d+)", said)[1]

    def hold(self, name, number, step=20):
        """Wait until a run has done a step, and have its rank 0 do no more."""
        metrics = self.runs.directory(name) / "metrics.jsonl"
        self.until(lambda: metrics.exists() and metrics.read_bytes().count(b'"train"') >= step, name, number)
        rank_0 = self.runs.holder(name)["pid"]
        os.kill(rank_0, signal.SIGSTOP)
        assert self.runs.status(name)[0] == "running", "the run was over before it could be held"
        return rank_0

    def until(self, holds, name, number):
        """Wait until it holds. AssertionError with the job's log if it does not come to, or the job fails."""

        def check():
            assert self.cluster.state(number) != "FAILED", self.log(name)
            return holds()

        until(check, lambda: self.log(name))

    def log(self, name):
        return "\n".join(path.read_text() for path in self.runs.directory(name).glob("slurm/*.log"))

    def until_finished(self, name, number, ranks=1):
        """Wait for a run's end, which must be that of the same run that nothing happened to."""
        self.until(lambda: read_status(self.runs.directory(name)).get("state") == "finished", name, number)
        whole = f"whole-{ranks}"
        if not self.runs.directory(whole).exists():
            self.runs.finish(ranks, whole, *STEPS)
        assert self.runs.outcome(name, other_saves=True) == self.runs.outcome(whole, other_saves=True)
        log = self.log(name)
        assert "Traceback" not in log and "SignalException" not in log, log


@pytest.fixture
def jobs(slurm, runs, monkeypatch):
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])
    yield Jobs(slurm, runs)
    slurm.restore()


def test_a_job_whose_time_is_nearly_over_saves_requeues_itself_and_goes_on(jobs, monkeypatch):
    # The shortest time that SLURM knows; it looks every 30 seconds whom to tell. Variables win over what stands in the file.
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    monkeypatch.setenv("SBATCH_SIGNAL", "B:USR1@50")
    number = jobs.submit("time")
    rank_0 = jobs.hold("time", number, step=1)
    jobs.until((jobs.runs.directory("time") / "STOP").exists, "time", number)
    os.kill(rank_0, signal.SIGCONT)
    jobs.until(lambda: jobs.cluster.restarts(number) >= 1, "time", number)
    jobs.cluster.ask(
        "scontrol", "update", f"JobId={number}", "TimeLimit=10"
    )  # for one more turn, however slow the machine is
    log = jobs.log("time")
    assert "SIGUSR1: asking the run to save and stop" in log
    assert re.search(r"stopped at step \d+ \(STOP file\)", log) and "requeued" in log
    jobs.until_finished("time", number)
    assert "going on from step" in jobs.runs.log("time") or "going on after step" in jobs.runs.log("time")


def test_a_job_that_is_cancelled_saves_and_is_not_brought_back(jobs):
    number = jobs.submit("cancel")
    jobs.hold("cancel", number)
    jobs.cluster.ask("scancel", number)
    jobs.until(lambda: jobs.cluster.state(number) == "CANCELLED", "cancel", number)
    jobs.until(lambda: not jobs.cluster.queued(), "cancel", number)
    state, step, _ = jobs.runs.status("cancel")
    assert state == "stopped" and jobs.runs.checkpoints("cancel").load("latest").step == step
    assert jobs.cluster.restarts(number) == 0 and not (jobs.runs.directory("cancel") / "STOP").exists()
    number = jobs.submit("cancel")
    jobs.until_finished("cancel", number)


def test_a_job_that_is_preempted_saves_at_once_and_goes_on_when_there_is_room(jobs):
    number = jobs.submit("preempted")
    jobs.hold("preempted", number)
    urgent = jobs.cluster.submit("#!/bin/sh\ntrue\n", "--partition=urgent", "--nodes=2", "--cpus-per-task=4")
    jobs.until(lambda: jobs.cluster.state(urgent) == "COMPLETED", "preempted", number)
    assert jobs.cluster.restarts(number) == 1
    assert "stopped at step" in jobs.log("preempted") and "out of time" not in jobs.log("preempted")
    jobs.until_finished("preempted", number)


def test_a_job_whose_node_fails_goes_on_from_its_newest_checkpoint_when_the_node_is_back(jobs):
    number = jobs.submit("failure", sbatch=("--nodelist=127.0.0.2",))
    jobs.hold("failure", number, step=70)
    jobs.cluster.kill_node("127.0.0.2")
    until(lambda: jobs.cluster.restarts(number) == 1, lambda: jobs.cluster.ask("scontrol", "show", "job", number))
    jobs.cluster.start_node("127.0.0.2")
    jobs.until_finished("failure", number)
    assert "took over from process" in jobs.runs.log("failure")


def test_two_nodes_are_looked_at_then_train_together_and_stop_at_the_same_step(jobs):
    number = jobs.submit("nodes", nodes=2, doctor=True)
    rank_0 = jobs.hold("nodes", number)
    jobs.cluster.ask("scancel", "--batch", "--signal=USR1", number)  # as SLURM does before the time is over
    jobs.until((jobs.runs.directory("nodes") / "STOP").exists, "nodes", number)
    os.kill(rank_0, signal.SIGCONT)
    jobs.until(lambda: jobs.cluster.restarts(number) == 1, "nodes", number)
    jobs.until_finished("nodes", number, ranks=2)


GRID = """
title: Two
about: With a memory and without one.
start: start.yaml
rows: [slots]
columns: [keys]
measures: [perplexity]
cells:
  - {name: dense, set: [memory=null]}
  - {name: memory, set: []}
"""


def test_an_array_trains_each_run_of_a_grid_and_its_jobs_go_on_by_themselves(jobs, tmp_path):
    (tmp_path / "start.yaml").write_text(jobs.runs.settings("start").read_text())
    (tmp_path / "mine.yaml").write_text("about: As it is.\n")
    (tmp_path / "grid.yaml").write_text(GRID)
    grid = list_jobs([load_grid(str(tmp_path / "grid.yaml"), str(tmp_path / "mine.yaml"), STEPS)], [1])
    asked = launch.Job(**ONE_NODE)
    waiting = job_array.waiting(grid, asked)
    job_array.submit(waiting, asked, tmp_path / "slurm", None)
    assert job_array.waiting(grid, asked) == []
    for job in grid:
        until(
            lambda job=job: job.is_finished(),
            lambda: "\n".join(p.read_text() for p in (tmp_path / "slurm").glob("*.log")),
        )
        assert jobs.runs.server.run(str(job.file), *job.arguments, f"runs={tmp_path}/alone").code == 0
