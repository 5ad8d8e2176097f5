"""Runs the tasks of a stage on datatrove's executors, shows how far they are, and notices when one fails or dies.

A task is finished when its report, `<stage>/<rank>.json`, is there: it is written last and at once. That alone decides
what a killed preparation still has to do; datatrove's own marks of completion follow it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pkm.corpus.settings import Executor
from pkm.errors import UserError
from pkm.files import atomic_write

TICK_SECONDS = 1.0
# How long a stage may have tasks left and nobody at work on one before its workers are taken for dead.
IDLE_SECONDS = 60.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Stage:
    """Tasks of one kind. costs: bytes each reads, for progress and time left."""

    name: str
    title: str
    work: Path
    costs: Sequence[int]
    run: Callable[[Path, int, Tick], dict[str, Any]]
    """(work directory, rank, tick) -> report. Its outputs are complete before it returns."""

    def report(self, rank: int) -> Path:
        return self.work / self.name / f"{rank:05d}.json"

    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(self.report(rank).read_bytes()) for rank in range(len(self.costs))]

    def missing(self) -> list[int]:
        return [rank for rank in range(len(self.costs)) if not self.report(rank).exists()]


@dataclass
class Progress:
    """How far a stage is. reports: of the tasks that are done."""

    reports: list[dict[str, Any]]
    bytes_done: float
    words: int


class Tick:
    """What a task calls now and then: notes how far it is, and ends the process if whoever started it is gone."""

    def __init__(self, path: Path, driver: int | None):
        self._path, self._driver = path, driver
        self._next = 0.0

    def __call__(self, share: float, words: int) -> None:
        """share: of the task's bytes that are done, 0 to 1; words: read or written so far."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + TICK_SECONDS
        if self._driver is not None and not _lives(self._driver):
            os._exit(1)
        state = {"pid": os.getpid(), "host": socket.gethostname(), "share": min(share, 1.0), "words": words}
        self._path.write_text(json.dumps(state))


@dataclass
class Task:
    """One stage as datatrove runs it: a pipeline of a single step that reads, works and writes."""

    stage: str
    work: Path
    run: Callable[[Path, int, Tick], dict[str, Any]]
    driver: int | None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.driver is not None:
            _silence()

    def __call__(self, data: Any, rank: int, world_size: int) -> None:
        folder = self.work / self.stage
        report, running = folder / f"{rank:05d}.json", folder / "running" / f"{rank:05d}"
        if report.exists():
            return
        _let_forks_die_with_this_thread()
        tick = Tick(running, self.driver)
        tick(0, 0)
        began = time.monotonic()
        try:
            result = self.run(self.work, rank, tick)
        except Exception as error:
            _write_failure(folder / "failed" / f"{rank:05d}", error)
            raise RuntimeError(f"task {rank} of {self.stage} failed") from None
        result |= {"seconds": time.monotonic() - began, "peak_kilobytes": peak_kilobytes()}
        atomic_write(report, json.dumps(result, ensure_ascii=False))
        running.unlink(missing_ok=True)


def run_stage(stage: Stage, executor: Executor, watch: Callable[[Progress], None]) -> None:
    """Do what is missing of a stage. `watch` hears about every second how far it is, and may raise to stop it.

    UserError where a task fails with one, or a worker dies; other failures of a task come with its traceback.
    """
    for folder in ("running", "failed"):
        (stage.work / stage.name / folder).mkdir(parents=True, exist_ok=True)
    missing = stage.missing()
    if not missing:
        return
    for rank in missing:
        (_logs(stage) / "completions" / f"{rank:05d}").unlink(missing_ok=True)
        (stage.work / stage.name / "failed" / f"{rank:05d}").unlink(missing_ok=True)
        (stage.work / stage.name / "running" / f"{rank:05d}").unlink(missing_ok=True)
    if executor.kind == "slurm":
        _run_on_slurm(stage, executor, watch)
    else:
        _run_here(stage, min(executor.workers or cores(), len(missing)), watch)


def peak_kilobytes() -> int:
    """The most memory this process, or one it has waited for, ever held."""
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return peak // 1024 if sys.platform == "darwin" else peak


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _logs(stage: Stage) -> Path:
    # Absolute, because fsspec remembers relative ones beyond a change of directory.
    return stage.work.absolute() / "logs" / stage.name


def _run_here(stage: Stage, workers: int, watch: Callable[[Progress], None]) -> None:
    import multiprocess
    from datatrove.executor import LocalPipelineExecutor

    _silence()
    task = Task(stage.name, stage.work, stage.run, os.getpid())
    executor = LocalPipelineExecutor(
        pipeline=[task], tasks=len(stage.costs), workers=workers, logging_dir=str(_logs(stage))
    )
    outcome: list[BaseException] = []

    def run() -> None:
        _let_forks_die_with_this_thread()
        try:
            executor.run()
        except BaseException as error:
            outcome.append(error)

    # In a thread of its own, so that a worker that was killed, for which a pool waits for ever, can be noticed here.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    monitor = _Monitor(stage)
    try:
        while thread.is_alive():
            watch(monitor.look(workers > 1))
            thread.join(TICK_SECONDS)
        _raise_failure(stage)
        if outcome:
            raise outcome[0]
    finally:
        if thread.is_alive():
            for process in multiprocess.active_children():
                process.kill()
    watch(monitor.look(False))


class _Monitor:
    """Reads what the tasks of a stage write about themselves."""

    def __init__(self, stage: Stage):
        self.stage = stage
        self._done: dict[int, dict[str, Any]] = {}
        self._left = set(range(len(stage.costs)))
        self._busy = time.monotonic()
        self._suspect: set[int] = set()

    def look(self, workers_may_die: bool) -> Progress:
        """How far the stage is. Raises what failed; UserError where a worker is gone."""
        _raise_failure(self.stage)
        for rank in [rank for rank in self._left if self.stage.report(rank).exists()]:
            self._left.discard(rank)
            self._done[rank] = json.loads(self.stage.report(rank).read_bytes())
        done = list(self._done.values())
        words = sum(report.get("words", 0) for report in done)
        progress = Progress(done, sum(self.stage.costs[rank] for rank in self._done), words)
        running = _running(self.stage)
        for rank, state in running.items():
            if rank in self._left:
                progress.bytes_done += self.stage.costs[rank] * state["share"]
                progress.words += state["words"]
        if workers_may_die:
            self._check(running)
        return progress

    def _check(self, running: dict[int, dict[str, Any]]) -> None:
        here = {r: s for r, s in running.items() if s["host"] == socket.gethostname()}
        dead = {r for r, s in here.items() if r in self._left and not _lives(s["pid"]) and not self._finished(r)}
        if running or not self._left:
            self._busy = time.monotonic()
        idle = time.monotonic() - self._busy > IDLE_SECONDS
        if dead & self._suspect or idle:
            raise UserError(
                f"a worker died without a word while {self.stage.title} (killed, or out of memory?)",
                str(self.stage.work),
                "run the same command again: it goes on where it was; with fewer `executor.workers` if memory is short",
            )
        # A task may end between two looks: only what is dead twice is.
        self._suspect = dead

    def _finished(self, rank: int) -> bool:
        return (
            self.stage.report(rank).exists() or (self.stage.work / self.stage.name / "failed" / f"{rank:05d}").exists()
        )


def _running(stage: Stage) -> dict[int, dict[str, Any]]:
    found = {}
    for path in (stage.work / stage.name / "running").iterdir():
        # A file may be half written or gone by now; the next look sees it.
        with suppress(OSError, ValueError):
            found[int(path.name)] = json.loads(path.read_bytes())
    return found


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


_forks = threading.local()


def _let_forks_die_with_this_thread() -> None:
    """Processes forked from here (datatrove's manager, the sandbox of pages) are killed when this one is.

    Else each would be left behind, waiting for ever, when its parent is killed and cannot clean up.
    """
    if sys.platform != "linux":
        return
    if not hasattr(_forks, "libc"):
        os.register_at_fork(after_in_child=_die_with_parent)
    _forks.libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    if hasattr(_forks, "libc"):
        _forks.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _write_failure(path: Path, error: Exception) -> None:
    known = isinstance(error, UserError)
    content = {
        "user": [error.what, error.where, error.fix] if isinstance(error, UserError) else None,
        "traceback": "" if known else traceback.format_exc(),
    }
    atomic_write(path, json.dumps(content))


def _raise_failure(stage: Stage) -> None:
    for path in sorted((stage.work / stage.name / "failed").iterdir()):
        if path.name.startswith("."):
            continue
        failure = json.loads(path.read_bytes())
        if failure["user"]:
            raise UserError(*failure["user"])
        raise RuntimeError(f"a task failed while {stage.title}:\n{failure['traceback']}")


def _silence() -> None:
    """datatrove logs to the terminal; what matters of it is shown here."""
    from loguru import logger

    logger.disable("datatrove")


def _run_on_slurm(stage: Stage, executor: Executor, watch: Callable[[Progress], None]) -> None:
    """Submit a job array with datatrove and wait for it; a job that an earlier call submitted is waited for, too."""
    from datatrove.executor import SlurmPipelineExecutor

    _silence()
    slurm, record = executor.slurm, stage.work / stage.name / "slurm_job"
    job = record.read_text() if record.exists() else ""
    if not job or not _in_queue(job):
        minutes = round(slurm.hours * 60)
        runner = SlurmPipelineExecutor(
            pipeline=[Task(stage.name, stage.work.absolute(), stage.run, None)],
            tasks=len(stage.costs),
            time=f"{minutes // 60}:{minutes % 60:02d}:00",
            partition=slurm.partition or "",
            qos="",
            workers=executor.workers or -1,
            mem_per_cpu_gb=slurm.memory_gigabytes,
            job_name=f"prepare-{stage.name}",
            sbatch_args=dict(slurm.options),
            env_command=f'cd "{Path.cwd()}"; export PATH="{Path(sys.executable).parent}:$PATH"',
            logging_dir=str(_logs(stage)),
            with_srun=False,
        )
        try:
            runner.run()
        except (OSError, subprocess.CalledProcessError) as error:
            fix = "run the command where `sbatch` works, or with executor.kind=local"
            raise UserError(f"the job could not be submitted: {error}", "executor.kind", fix) from error
        job = str(runner.job_id)
        atomic_write(record, job)
    monitor = _Monitor(stage)
    while _in_queue(job):
        watch(monitor.look(False))
        time.sleep(10 * TICK_SECONDS)
    watch(monitor.look(False))
    record.unlink(missing_ok=True)
    if missing := stage.missing():
        raise UserError(
            f"{len(missing)} of {len(stage.costs)} tasks did not finish while {stage.title}",
            str(_logs(stage) / "slurm_logs"),
            "look at their logs; the same command runs just these again",
        )


def _in_queue(job: str) -> bool:
    """Whether SLURM still has a job, pending or running."""
    found = subprocess.run(["squeue", "--noheader", "--jobs", job], capture_output=True, text=True, check=False)
    return found.returncode == 0 and bool(found.stdout.strip())
