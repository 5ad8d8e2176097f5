"""Runs of a grid as a job array of a SLURM cluster: each of its jobs goes on, turn after turn, until its run is finished."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pkm import files
from pkm.config.schema import load
from pkm.errors import UserError
from pkm.evaluation.recall import is_asked
from pkm.evaluation.speed import seems_measured
from pkm.experiments.jobs import Job
from pkm.run.lock import lock_holder
from pkm.slurm import launch


def waiting(jobs: Sequence[Job], asked: launch.Job) -> list[Job]:
    """What is still to be run, by nobody else.

    UserError(s) for mistakes in what is asked of the cluster, and for settings that cannot work on so many ranks.
    """
    left = []
    queued = _queued()
    for job in jobs:
        trained = not job.trained or job.is_finished()
        measured = not job.timed or seems_measured(job.directory, job.trained)
        if trained and measured and not (job.recall and not is_asked(job.directory)):
            continue
        if not trained:
            launch.check(asked, load(job.file, job.arguments))
        submitted = (files.read_json(job.directory / "slurm.json") or {}).get("job")  # what it was last given to
        if lock_holder(job.directory / "lock") is None and submitted not in queued:
            left.append(job)
    return left


def script(jobs: Sequence[Job], asked: launch.Job, folder: Path, at_once: int | None) -> str:
    """The sbatch file of the array, whose logs go to `folder`."""
    work = []
    for job in jobs:
        title = f"{', '.join(job.cells)} seed {job.config.seed} -> {job.directory}"
        work.append(launch.Work(title, job.config, (str(job.file), *job.arguments), job.trained, job.timed, job.recall))
    log = f"{launch.escaped(folder)}/%{'A_%a' if len(work) > 1 else 'j'}.log"
    return launch.script(asked, work, "reproduce", log, Path.cwd(), at_once)


def submit(jobs: Sequence[Job], asked: launch.Job, folder: Path, at_once: int | None) -> str:
    """Hand the runs over as one array; its id. UserError without SLURM on this machine, or with what sbatch says against it."""
    path = folder / "launch.sbatch"
    files.atomic_write(path, script(jobs, asked, folder, at_once))
    number = launch.submit(path)
    for index, job in enumerate(jobs):
        name = f"{number}_{index}" if len(jobs) > 1 else number
        files.atomic_write(job.directory / "slurm.json", json.dumps({"job": name}) + "\n")
    return number


def _queued() -> set[str]:
    """The user's jobs that wait or run."""
    if shutil.which("squeue") is None:
        return set()
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired as late:
        raise UserError("squeue does not answer", "--slurm", "try again when the cluster does") from late
    return {line.strip() for line in asked.stdout.splitlines()}
