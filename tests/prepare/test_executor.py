"""pkm/prepare/executor.py: tasks run once, whoever runs them, and a failure is heard of."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from pkm.corpus.store import open_corpus
from pkm.errors import UserError
from pkm.prepare.executor import run_stage
from pkm.prepare.settings import Slurm
from pkm.prepare.stage import Stage, Tick
from tests.prepare.conftest import made_articles, write_jsonl


def square(work: Path, rank: int, tick: Tick) -> dict[str, Any]:
    tick(0.5, rank)
    with open(work / "ran", "a") as file:
        file.write(f"{rank}\n")
    return {"words": rank, "square": rank * rank}


def refuse_two(work: Path, rank: int, tick: Tick) -> dict[str, Any]:
    if rank == 2:
        raise UserError("this input is odd", "in.txt:3", "make it even")
    return square(work, rank, tick)


def break_at_two(work: Path, rank: int, tick: Tick) -> dict[str, Any]:
    return {"words": 1 // (2 - rank)}


def die_at_two(work: Path, rank: int, tick: Tick) -> dict[str, Any]:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return square(work, rank, tick)


def stage(work: Path, run, tasks: int = 5) -> Stage:
    return Stage("squares", "squaring", work, [10] * tasks, run)


@pytest.mark.parametrize("workers", [1, 3])
def test_every_task_runs_once_and_what_is_done_stays_done(tmp_path: Path, workers):
    seen = []
    run_stage(stage(tmp_path, square), workers, None, lambda p: seen.append((len(p.reports), p.bytes_done, p.words)))
    assert [report["square"] for report in stage(tmp_path, square).reports()] == [0, 1, 4, 9, 16]
    assert seen[-1] == (5, 50, 10)
    stage(tmp_path, square).report(3).unlink()
    run_stage(stage(tmp_path, square), workers, None, lambda p: None)
    assert sorted((tmp_path / "ran").read_text().split()) == ["0", "1", "2", "3", "3", "4"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_met_by_a_task_reaches_the_user_and_the_next_call_goes_on(tmp_path: Path, workers):
    with pytest.raises(UserError, match="this input is odd") as caught:
        run_stage(stage(tmp_path, refuse_two), workers, None, lambda p: None)
    assert (caught.value.where, caught.value.fix) == ("in.txt:3", "make it even")
    run_stage(stage(tmp_path, square), workers, None, lambda p: None)
    assert stage(tmp_path, square).missing() == []


def test_a_bug_in_a_task_comes_with_its_traceback(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"squaring[\s\S]*ZeroDivisionError"):
        run_stage(stage(tmp_path, break_at_two), 1, None, lambda p: None)


def test_a_worker_that_is_killed_is_noticed_and_the_next_call_goes_on(tmp_path: Path):
    with pytest.raises(UserError, match="a worker died without a word while squaring"):
        run_stage(stage(tmp_path, die_at_two), 2, None, lambda p: None)
    run_stage(stage(tmp_path, square), 1, None, lambda p: None)
    assert stage(tmp_path, square).missing() == []


def test_whoever_looks_on_can_stop_a_stage(tmp_path: Path):
    def stop(progress):
        raise UserError("enough")

    with pytest.raises(UserError, match="enough"):
        run_stage(stage(tmp_path, square), 2, None, stop)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch) -> Path:
    """A cluster in a directory: sbatch runs the array's jobs at once, one after the other; the queue is always empty."""
    programs = {
        "sbatch": """#!/bin/bash
script="${@: -1}"; cp "$script" "$SLURM_TEST/script"
grep -q merge_stats "$script" && { echo Submitted batch job 2; exit; }
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
for i in $(seq 0 "$last"); do
    SLURM_ARRAY_TASK_ID=$i SLURM_NODELIST=here RUN_OFFSET=0 bash "$script" >> "$SLURM_TEST/log" 2>&1
done
echo Submitted batch job 1
""",
        "squeue": "#!/bin/bash\necho Invalid job id specified >&2; exit 1\n",
        "scontrol": "#!/bin/bash\necho localhost\n",
    }
    folder = tmp_path / "cluster"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_TEST", str(folder))
    return folder


def test_slurm_jobs_give_the_same_corpus_as_local_workers(slurm, prepared):
    write_jsonl(Path("in.jsonl"), made_articles(40))
    here = prepared("in.jsonl", "here")
    jobs = {"partition": "cpu", "hours": 1.5, "options": {"account": "me"}}
    there = prepared("in.jsonl", "there", workers=3, executor="slurm", slurm=jobs)
    assert open_corpus(there).fingerprint == open_corpus(here).fingerprint
    script = (slurm / "script").read_text()
    assert "#SBATCH --partition=cpu" in script and "#SBATCH --account=me" in script


def test_slurm_tasks_that_did_not_finish_are_counted_and_their_logs_named(slurm, tmp_path: Path):
    (slurm / "sbatch").write_text("#!/bin/bash\necho Submitted batch job 7\n")
    slurm_options = Slurm(partition="cpu")
    with pytest.raises(UserError, match="5 of 5 tasks did not finish while squaring") as caught:
        run_stage(stage(tmp_path, square), None, slurm_options, lambda p: None)
    assert "slurm_logs" in (caught.value.where or "")


def test_without_slurm_the_error_says_so(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm_options = Slurm(partition="cpu")
    with pytest.raises(UserError, match="could not be submitted"):
        run_stage(stage(tmp_path, square), None, slurm_options, lambda p: None)


def test_a_task_notes_how_far_it_is(tmp_path: Path):
    tick = Tick(tmp_path / "running")
    tick(0.25, 7)
    state = json.loads((tmp_path / "running").read_text())
    assert (state["share"], state["words"], state["pid"]) == (0.25, 7, os.getpid())
