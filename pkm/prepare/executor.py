"""Runs the tasks of a stage on datatrove's executors: here, or as SLURM jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pkm
from pkm.errors import UserError
from pkm.files import atomic_write
from pkm.prepare.settings import Slurm
from pkm.prepare.stage import TICK_SECONDS, Monitor, Progress, Stage, Task, raise_failure, silence

Watch = Callable[[Progress], None]


def run_stage(stage: Stage, workers: int | None, slurm: Slurm | None, watch: Watch) -> None:
    """Do what is missing of a stage, with `workers` of this machine (None: one a core) or as SLURM jobs. `watch` hears about every second how far it is, and may raise to stop it.

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
    here = min(workers or cores(), len(missing))
    if slurm is not None:
        _run_on_slurm(stage, workers, slurm, watch)
    elif here == 1:
        _run_alone(stage, missing, watch)
    else:
        _run_here(stage, here, watch)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _logs(stage: Stage) -> Path:
    # Absolute, because fsspec remembers relative ones beyond a change of directory.
    return stage.work.absolute() / "logs" / stage.name


def _run_alone(stage: Stage, ranks: list[int], watch: Watch) -> None:
    """One worker is a thread of this process: no other is started."""
    from datatrove.executor import LocalPipelineExecutor

    task = Task(stage.name, stage.work, stage.run, quiet=True)
    executor = LocalPipelineExecutor([task], tasks=len(stage.costs), workers=1, logging_dir=str(_logs(stage)))
    outcome: list[Exception] = []

    def run() -> None:
        try:
            for rank in ranks:
                executor._run_for_rank(rank)
        except Exception as error:
            outcome.append(error)

    monitor = Monitor(stage)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        watch(monitor.look(workers_may_die=False))
        thread.join(TICK_SECONDS)
    raise_failure(stage)
    if outcome:
        raise outcome[0]
    watch(monitor.look(workers_may_die=False))


def _run_here(stage: Stage, workers: int, watch: Watch) -> None:
    """Several workers are a process group of their own (worker_group.py), which can be ended whole.

    A pool of processes waits for ever for a worker that was killed, so its tasks are watched from outside.
    """
    import dill
    from datatrove.executor import LocalPipelineExecutor

    logs = _logs(stage)
    task = Task(stage.name, stage.work, stage.run, quiet=True)
    executor = LocalPipelineExecutor([task], tasks=len(stage.costs), workers=workers, logging_dir=str(logs))
    logs.mkdir(parents=True, exist_ok=True)
    atomic_write(logs / "executor.pik", dill.dumps(executor, fmode=dill.CONTENTS_FMODE))
    command = [sys.executable, "-m", "pkm.prepare.worker_group", str(logs / "executor.pik"), str(os.getpid())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([_code(), *filter(None, sys.path)])}
    monitor = Monitor(stage)
    with open(logs / "runner.log", "w") as log:
        runner = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        while runner.poll() is None:
            watch(monitor.look(workers_may_die=True))
            with suppress(subprocess.TimeoutExpired):
                runner.wait(TICK_SECONDS)
        watch(monitor.look(workers_may_die=False))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(runner.pid, signal.SIGKILL)
        runner.wait()
    if stage.missing():
        said = (logs / "runner.log").read_text(errors="replace").strip().splitlines()
        raise UserError(
            f"the workers ended too early while {stage.title} ({said[-1] if said else f'status {runner.returncode}'})",
            str(logs / "runner.log"),
            "run the same command again: it goes on where it was",
        )


def _run_on_slurm(stage: Stage, workers: int | None, slurm: Slurm, watch: Watch) -> None:
    """Submit a job array with datatrove and wait for it; a job that an earlier call submitted is waited for, too."""
    from datatrove.executor import SlurmPipelineExecutor

    record = stage.work / stage.name / "slurm_job"
    job = record.read_text() if record.exists() else ""
    if not job or not _in_queue(job):
        minutes = round(slurm.hours * 60)
        runner = SlurmPipelineExecutor(
            pipeline=[Task(stage.name, stage.work.absolute(), stage.run, quiet=False)],
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
        watch(monitor.look(workers_may_die=False))
        time.sleep(10 * TICK_SECONDS)
    watch(monitor.look(workers_may_die=False))
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
