"""Runs the tasks of a stage: here, in processes of this machine, or as SLURM jobs, with datatrove."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pkm
from pkm.distributed.torchrun import kill_all
from pkm.errors import UserError
from pkm.files import atomic_write
from pkm.machine import cores
from pkm.prepare.settings import Slurm
from pkm.prepare.stage import TICK_SECONDS, Monitor, Progress, Stage, Task

Watch = Callable[[Progress], None]


def run_stage(stage: Stage, workers: int | None, slurm: Slurm | None, watch: Watch) -> None:
    """Do what is missing of a stage, with `workers` of this machine (None: one a core) or as SLURM jobs.

    watch   is told about every second how far it is, and may raise to stop it

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
    silence()
    if slurm is not None:
        _run_on_slurm(stage, workers, slurm, watch)
    elif (here := min(workers or cores(), len(missing))) == 1:
        _wait({_in_a_thread(stage, missing)}, stage, watch)
    else:
        _run_here(stage, missing, here, watch)


def silence() -> None:
    """datatrove logs to the terminal; what matters of it is shown otherwise."""
    from loguru import logger

    logger.disable("datatrove")


def _logs(stage: Stage) -> Path:
    # Absolute, because fsspec remembers relative ones beyond a change of directory.
    return stage.work.absolute() / "logs" / stage.name


def _wait(tasks: set[Future[None]], stage: Stage, watch: Watch) -> None:
    """Until all tasks are done; raises what the first to fail raised."""
    monitor = Monitor(stage)
    while tasks:
        done, tasks = wait(tasks, TICK_SECONDS, FIRST_EXCEPTION)
        watch(monitor.look())
        for task in done:
            task.result()


def _in_a_thread(stage: Stage, ranks: list[int]) -> Future[None]:
    """One worker is a thread of this process, which does not stay alive for it."""
    done: Future[None] = Future()

    def work() -> None:
        try:
            for rank in ranks:
                Task.of(stage)(rank=rank)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return done


def _run_here(stage: Stage, ranks: list[int], workers: int, watch: Watch) -> None:
    """Several workers are processes. Each ends when this process closes its end of a pipe, or dies, which closes it too."""
    context = get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    log = _logs(stage) / "workers.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    pool = ProcessPoolExecutor(workers, context, _begin, (theirs, log))
    try:
        _wait({pool.submit(Task.of(stage), rank=rank) for rank in ranks}, stage, watch)
    except BrokenProcessPool as error:
        said = log.read_text(errors="replace").strip().splitlines()
        raise UserError(
            f"a worker died without a word while {stage.title} ({said[-1] if said else 'killed, or out of memory?'})",
            str(log if said else stage.work),
            "run the same command again: it goes on where it was; with fewer `workers` if memory is short",
        ) from error
    finally:
        ours.close()
        pool.shutdown(wait=False, cancel_futures=True)


def _begin(alive: Connection, log: Path) -> None:
    """Set up a worker: what it prints goes to a file, and Ctrl-C is left to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(log, "ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    silence()

    def end_with_parent() -> None:
        alive.poll(None)
        kill_all(os.getpid())

    threading.Thread(target=end_with_parent, daemon=True).start()


def _run_on_slurm(stage: Stage, workers: int | None, slurm: Slurm, watch: Watch) -> None:
    """Submit a job array with datatrove and wait for it; a job that an earlier call submitted is waited for, too."""
    from datatrove.executor import SlurmPipelineExecutor

    record = stage.work / stage.name / "slurm_job"
    job = record.read_text() if record.exists() else ""
    if not job or not _in_queue(job):
        minutes = round(slurm.hours * 60)
        runner = SlurmPipelineExecutor(
            pipeline=[Task(stage.name, stage.work.absolute(), stage.run)],
            tasks=len(stage.costs),
            time=f"{minutes // 60}:{minutes % 60:02d}:00",
            partition=slurm.partition or "",
            qos="",
            workers=workers or -1,
            mem_per_cpu_gb=slurm.memory_gigabytes,
            job_name=f"prepare-{stage.name}",
            sbatch_args=dict(slurm.options),
            env_command=_environment(),
            logging_dir=str(_logs(stage)),
            with_srun=False,
        )
        try:
            runner.run()
        except (OSError, subprocess.CalledProcessError) as error:
            fix = "run the command where `sbatch` works, or with executor=local"
            raise UserError(f"the job could not be submitted: {error}", "executor", fix) from error
        job = str(runner.job_id)
        atomic_write(record, job)
    monitor = Monitor(stage)
    while _in_queue(job):
        watch(monitor.look())
        time.sleep(10 * TICK_SECONDS)
    watch(monitor.look())
    record.unlink(missing_ok=True)
    if missing := stage.missing():
        raise UserError(
            f"{len(missing)} of {len(stage.costs)} tasks did not finish while {stage.title}",
            str(_logs(stage) / "slurm_logs"),
            "look at their logs; the same command runs just these again",
        )


def _environment() -> str:
    """Shell commands that give a job this directory, this interpreter and this code."""
    programs = Path(sys.executable).parent
    return f'cd "{Path.cwd()}"; export PATH="{programs}:$PATH" PYTHONPATH="{_code()}:$PYTHONPATH"'


def _code() -> str:
    return str(Path(pkm.__file__).parents[1])


def _in_queue(job: str) -> bool:
    """Whether SLURM still has a job, pending or running. Where it does not answer, the job is taken to be there."""
    found = subprocess.run(["squeue", "--noheader", "--jobs", job], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        return "invalid job id" not in found.stderr.lower()
    return bool(found.stdout.strip())
