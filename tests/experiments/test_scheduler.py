"""What becomes of a grid's runs on one machine; train.py is played by tests/support/fake_train.py."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from pkm.errors import UserError
from pkm.experiments import workers
from pkm.experiments.estimate import Estimator
from pkm.experiments.grid import load_grid
from pkm.experiments.jobs import Job, list_jobs
from pkm.experiments.live_table import LiveTable
from pkm.experiments.scheduler import Scheduler
from pkm.experiments.task import Progress, Task
from pkm.experiments.workers import Worker
from pkm.report.results import read_result
from pkm.run.lock import Lock
from pkm.run.status import read_status
from tests.support.tiny import tiny_config

FAKE_TRAIN = Path(__file__).parents[1] / "support" / "fake_train.py"
FAKE_EVALUATE = FAKE_TRAIN.with_name("fake_evaluate.py")


@dataclass
class Grids:
    runs: Path
    corpus: Path

    def jobs(self, *names: str, seeds: int = 1) -> list[Job]:
        settings = [f"corpus.path={self.corpus}", f"runs={self.runs}"]
        return list_jobs([load_grid(name, "smoke", settings) for name in names], range(1, seeds + 1))

    def run(self, jobs: list[Job], acts: dict[str, str], at_once: int = 2, terminal: bool = False):
        self.runs.mkdir(exist_ok=True)
        (self.runs / "acts.json").write_text(json.dumps(acts))
        out = io.StringIO()
        pool = Scheduler(
            jobs, [Worker()] * at_once, LiveTable(Estimator(), Console(file=out, width=200, force_terminal=terminal))
        )
        pool.run()
        return pool, out.getvalue()

    def begun(self) -> list[str]:
        path = self.runs / "begun.txt"
        return [json.loads(line)["name"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def grids(tiny_corpus_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Grids:
    monkeypatch.setattr(workers, "TRAIN", FAKE_TRAIN)
    monkeypatch.setattr(workers, "EVALUATE", FAKE_EVALUATE)
    monkeypatch.setattr("pkm.experiments.scheduler.POLL_SECONDS", 0.02)
    return Grids(tmp_path / "runs", tiny_corpus_path)


def test_every_run_is_run_once_seed_by_seed_and_the_finished_never_again(grids: Grids) -> None:
    jobs = [job for job in grids.jobs("table3", seeds=2) if job.config.memory_layers < (3,)]
    assert [(job.config.memory_layers[0], job.config.seed) for job in jobs] == [(1, 1), (2, 1), (1, 2), (2, 2)]
    pool, said = grids.run(jobs, {}, at_once=1)
    assert grids.begun() == [job.config.name for job in jobs]
    assert {task.state for task in pool.tasks} == {"finished"} and not pool.failed
    assert "4 runs: 0 finished before, 4 to train, 1 at a time" in said
    assert "[1/4] table3/position-1 seed 1 finished: perplexity 12.50" in said
    pool, said = grids.run(jobs, {})
    assert len(grids.begun()) == 4
    assert said == "4 runs: 4 finished before\n"


def test_a_failed_run_says_why_and_does_not_stop_the_others(grids: Grids) -> None:
    jobs = grids.jobs("table3")
    acts = {"layer1-": "fail", "layer2-": "error", "layer3-": "die", "layer4-": "stop"}
    pool, said = grids.run(jobs, acts)
    assert [task.state for task in pool.tasks] == ["failed"] * 3 + ["stopped", "finished", "finished"]
    assert "[1/6] table3/position-1 seed 1 failed: the loss is not finite" in said
    assert "position-2 seed 1 failed: the settings are wrong\n  fix: write others" in said
    assert "position-3 seed 1 failed: killed by SIGKILL (out of memory?)" in said
    assert "position-4 seed 1 stopped: time limit, at step 5" in said
    assert "this is said by" not in said
    assert "this is said by" in (jobs[0].directory / "output.txt").read_text()
    # Its status says so too, of which a report reads; a run that was killed could not write it.
    assert read_status(jobs[2].directory)["reason"] == "killed by SIGKILL (out of memory?)"
    assert [read_result(job.config).state for job in jobs[:4]] == ["failed"] * 3 + ["stopped"]
    # The same call tries again what is not finished, and an old status is not taken for a new one's.
    pool, said = grids.run(jobs, {"layer1-": "error"})
    assert [task.state for task in pool.tasks] == ["failed"] + ["finished"] * 5
    assert "position-1 seed 1 failed: the settings are wrong" in said


def test_on_a_signal_every_run_saves_and_the_rest_is_left_for_the_next_time(grids: Grids) -> None:
    jobs = grids.jobs("table3")
    pool, said = grids.run(jobs, {"layer2-": "wait"}, at_once=1)
    assert pool.stopped_by == "SIGTERM" and not pool.failed
    assert [task.state for task in pool.tasks] == ["finished", "stopped"] + ["waiting"] * 4
    assert "every run saves, then stops" in said and "position-2 seed 1 stopped: SIGTERM, at step 3" in said
    pool, said = grids.run(jobs, {})
    assert {task.state for task in pool.tasks} == {"finished"}
    assert "1 finished before, 5 to train" in said and "position-2 seed 1 started, goes on after step 3\n" in said


def test_a_second_signal_kills_the_runs(grids: Grids) -> None:
    pool, said = grids.run(grids.jobs("table3"), {"layer1-": "deaf"}, at_once=1)
    assert pool.tasks[0].state == "stopped" and "killing the runs" in said


def test_a_second_signal_at_whatever_moment_kills_the_runs(grids: Grids, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here after the runs were looked at whether they are to be killed; the run's own comes third."""
    real, sent = workers.RunProcess.ended, []

    def ended(child: workers.RunProcess) -> bool:
        if child.asked and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return real(child)

    monkeypatch.setattr(workers.RunProcess, "ended", ended)
    pool, _ = grids.run(grids.jobs("table3"), {"layer1-": "deaf"}, at_once=1)
    assert sent and pool.tasks[0].state == "stopped"


def test_what_a_second_signal_says_is_not_lost_while_the_first_is_said(
    grids: Grids, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LiveTable.say

    def say(board: LiveTable, *args) -> None:
        real(board, *args)
        if args[0].startswith("SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LiveTable, "say", say)
    _, said = grids.run(grids.jobs("table3"), {"layer1-": "wait"}, at_once=1)
    assert "killing the runs" in said


def test_a_run_that_another_process_is_at_work_on_is_left_to_it(grids: Grids) -> None:
    jobs = grids.jobs("table3")
    jobs[0].directory.mkdir(parents=True)
    lock = Lock(jobs[0].directory / "lock")
    lock.acquire(print)
    pool, said = grids.run(jobs, {})
    assert pool.tasks[0].state == "elsewhere" and not pool.failed
    assert "position-1 seed 1 running elsewhere: process" in said
    assert len(grids.begun()) == 5
    # Once that is over it is taken up, or found finished.
    lock.release()
    pool, said = grids.run(jobs, {})
    assert pool.tasks[0].state == "finished" and len(grids.begun()) == 6


class TestFacts:
    @pytest.fixture
    def jobs(self, grids: Grids) -> list[Job]:
        jobs = grids.jobs("table3")[:3]
        for job in jobs:
            job.recall = True
        return jobs

    @staticmethod
    def asked(jobs: list[Job]) -> list[int]:
        """The cells in the order in which they were asked."""
        names = [job.directory.name for job in jobs]
        return [names.index(name) for name in (jobs[0].directory.parent / "asked.txt").read_text().split()]

    def test_every_finished_run_is_asked_once(self, grids: Grids, jobs: list[Job]) -> None:
        pool, said = grids.run(jobs, {"layer2-": "fail"})
        assert sorted(self.asked(jobs)) == [0, 2]
        assert [task.state for task in pool.tasks] == ["finished", "failed", "finished"]
        assert "[1/3] table3/position-1 seed 1 asked for 900 facts, recall 0.750 nats a token" in said
        assert not (jobs[0].directory / "facts.txt").exists()
        pool, said = grids.run(jobs, {})
        assert self.asked(jobs)[2:] == [1] and not pool.failed
        # One of another step is not that of the report.
        (jobs[2].directory / "facts.json").write_text(json.dumps({"step": 10, "asked": 3, "groups": {}}))
        grids.run(jobs, {})
        assert self.asked(jobs)[3:] == [2]

    def test_a_run_that_cannot_be_asked_says_why_and_stays_trained(self, grids: Grids, jobs: list[Job]) -> None:
        grids.run(jobs[:0], {})
        (jobs[0].directory.parent).mkdir(parents=True)
        (jobs[0].directory.parent / "act_facts.json").write_text('{"layer1-": "fail"}')
        pool, said = grids.run(jobs, {})
        assert "position-1 seed 1 failed: recall: no names, places or numbers were found" in said
        assert [task.state for task in pool.tasks] == ["failed", "finished", "finished"]
        assert read_result(jobs[0].config).state == "finished"

    def test_who_is_told_to_stop_asks_the_rest_later(self, grids: Grids, jobs: list[Job]) -> None:
        jobs[0].directory.parent.mkdir(parents=True)
        acts = jobs[0].directory.parent / "act_facts.json"
        acts.write_text('{"layer2-": "wait"}')
        pool, _ = grids.run(jobs, {}, at_once=1)
        assert pool.stopped_by == "SIGTERM" and self.asked(jobs) == [0, 1]
        assert [task.state for task in pool.tasks] == ["finished"] * 3
        acts.unlink()
        pool, _ = grids.run(jobs, {}, at_once=1)
        assert pool.stopped_by is None and self.asked(jobs)[2:] == [1, 2]


def test_the_live_table_shows_states_and_how_far_the_whole_is(grids: Grids, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pkm.experiments.live_table.REFRESH_SECONDS", 0.0)
    tasks = [Task(job) for job in grids.jobs("table3")]
    out = io.StringIO()
    board = LiveTable(Estimator(), Console(file=out, width=120, height=30, force_terminal=True))
    with board.shown(tasks, 2):
        tasks[0].state, tasks[0].reason = "failed", "the loss is not finite"
        board.ended(tasks[0])
        tasks[1].state = "running"
        tasks[1].progress = Progress(step=5, loss=2.0, speeds=[1024.0])
        board.tick()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "[1/6] table3/position-1 seed 1 failed: the loss is not finite" in plain
    assert re.search(r"table3/position-1 seed 1\s+failed\s+0/20", plain)
    # 15 steps of 1,024 tokens at 1,024 tokens/s, a start, and a few windows to score.
    assert re.search(r"table3/position-2 seed 1\s+running\s+5/20\s+2.000\s+1,024\s+0:2\d", plain)
    assert "4 more to come" in plain and re.search(
        r"0 of 6 finished, 1 failed \| \d:\d\d elapsed, about \d:\d\d left", plain
    )


class TestWorkers:
    def test_on_gpus_each_has_a_group_of_its_own(self) -> None:
        configs = [tiny_config(device="auto", threads=None)]
        four = ["0", "1", "GPU-abc", "3"]
        assert [w.gpus for w in workers.workers(configs, four, 1, None)] == [("0",), ("1",), ("GPU-abc",), ("3",)]
        assert [w.gpus for w in workers.workers(configs, four, 2, None)] == [("0", "1"), ("GPU-abc", "3")]
        assert [w.gpus for w in workers.workers(configs, four, 3, None)] == [("0", "1", "GPU-abc")]
        assert [w.gpus for w in workers.workers(configs, ["0", "1"], 1, 3)] == [("0",), ("1",), ("0",)]
        two = workers.workers(configs, four, 2, None)[1]
        assert two.ranks == 2 and two.environment(configs[0])["CUDA_VISIBLE_DEVICES"] == "GPU-abc,3"

    def test_on_a_cpu_there_are_as_many_as_the_runs_threads_leave_room_for(self, monkeypatch) -> None:
        monkeypatch.setattr(workers, "cores", lambda: 8)
        one, three, free = (tiny_config(device="cpu", threads=threads) for threads in (1, 3, None))
        assert len(workers.workers([one], [], 1, None)) == 8
        assert len(workers.workers([one, three], [], 1, None)) == 2
        assert len(workers.workers([free], [], 1, None)) == 1
        assert [w.cores for w in workers.workers([free], [], 1, 4)] == [2] * 4
        assert workers.workers([free], [], 1, 4)[0].environment(free)["OMP_NUM_THREADS"] == "2"
        assert workers.workers([one], ["0"], 1, None)[0].environment(one)["OMP_NUM_THREADS"] == "1"

    @pytest.mark.parametrize(
        ("gpus", "gpus_per_run", "jobs"), [([], 2, None), (["0"], 2, None), (["0"], 0, None), ([], 1, 0)]
    )
    def test_what_this_machine_cannot_do_is_refused(self, gpus, gpus_per_run, jobs) -> None:
        with pytest.raises(UserError):
            workers.workers([tiny_config(device="auto")], gpus, gpus_per_run, jobs)

    def test_several_ranks_are_started_by_torchrun_and_stopped_by_a_file(self, grids: Grids, monkeypatch) -> None:
        job = grids.jobs("table3")[0]
        command = workers.train_command(job, 2)
        assert (
            command[1:5] == ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
            and "--nproc-per-node=2" in command
        )
        child = workers.RunProcess(job, Worker(("0", "1")), ["sleep", "100"], job.directory / "output.txt")
        child.ask_to_stop()
        assert (job.directory / "STOP").exists() and child.process.poll() is None
        child.kill()
        child.process.wait()
        assert child.ended() and not (job.directory / "STOP").exists()
