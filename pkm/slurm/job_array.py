"""Runs of a grid as a job array of a SLURM cluster, by submitit: each job goes on, turn after turn, until its run is finished."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from pkm import files
from pkm.config.schema import load
from pkm.distributed.torchrun import ONE_NODE, kill_all
from pkm.errors import UserError
from pkm.evaluation.speed import seems_measured
from pkm.experiments.jobs import TRAIN, Job
from pkm.experiments.workers import speed_command
from pkm.run.lock import lock_holder
from pkm.run.status import mark_failed, read_status
from pkm.run.stop import STOP_FILE
from pkm.slurm import launch

RESTARTS = 3
"""Times that torchrun starts the ranks again when one dies."""
TURNS = 1000
"""Times that a job may run out of time and be requeued."""


@dataclass
class ArrayJob:
    """What a job of the array calls: train until finished or told to stop, then measure words a second where asked.

    submitit hears SIGUSR2, which SLURM sends before the time is over, and calls `checkpoint`; what that returns is run
    when the job was requeued. SIGTERM comes before a preemption: the run saves, and SLURM itself requeues the job.
    """

    job: Job
    ranks: int
    nodes: int
    grace_seconds: float
    """To save in."""
    _code: int | None = field(default=None, init=False)
    _process: Any = field(default=None, init=False)
    _asked: bool = field(default=False, init=False)
    _before: dict[str, Any] = field(default_factory=dict, init=False)
    """The status that it found."""

    def __call__(self) -> str:
        """The state the run is left in: finished or stopped. RuntimeError with its reason if it failed."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._terminate)
        first = int(os.environ.get("SLURM_PROCID", "0")) == 0
        if self.job.trained and not self.job.is_finished():
            self._before = read_status(self.job.directory)
            self._run(self._train_command())
            if not self.job.is_finished() or not first:
                return self._outcome(first)
        if first and self.job.timed and not seems_measured(self.job.directory, self.job.trained):
            self._run(speed_command(self.job), _first_gpu())
            if self._code:
                raise RuntimeError("words a second could not be measured: see above")
        return "finished"

    def checkpoint(self) -> Any:
        """Save, and say how to go on; None if the run failed meanwhile."""
        from submitit.helpers import DelayedSubmission

        self._ask_to_stop()
        deadline = time.monotonic() + self.grace_seconds
        while self._process is not None and self._code is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if self._process is not None and self._code is None:
            kill_all(self._process.pid)
        if self.ranks > 1:
            (self.job.directory / STOP_FILE).unlink(missing_ok=True)
        if self._code and read_status(self.job.directory).get("state") == "failed":
            return None
        return DelayedSubmission(ArrayJob(self.job, self.ranks, self.nodes, self.grace_seconds))

    def _train_command(self) -> list[str]:
        training = [str(TRAIN), str(self.job.file), *self.job.arguments]
        if self.ranks == 1:
            return [sys.executable, *training]
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--max-restarts={RESTARTS}"]
        if self.nodes == 1:
            return [*torchrun, *ONE_NODE, f"--nproc-per-node={self.ranks}", *training]
        from submitit import JobEnvironment

        here = JobEnvironment()
        turn = f"{here.job_id}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        number = int(here.raw_job_id)
        return [
            *torchrun,
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.ranks // self.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={here.hostnames[0]}:{10000 + number % 20000}",
            f"--rdzv-id={turn}",
            f"--rdzv-conf=is_host={int(here.node == 0)}",
            *training,
        ]

    def _run(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        """Run to its end. A thread waits for it, so that a signal's handler can look at what came of it."""
        share = max(len(os.sched_getaffinity(0)) // max(self.ranks // self.nodes, 1), 1)
        own = {
            "OMP_NUM_THREADS": str(self.job.config.threads or share),
            "PYTHONUNBUFFERED": "1",
            # Ranks that are started again would meet by what those before them left in torchrun's own store.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **(environment or {}),
        }
        self._code = None
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **own},
            start_new_session=True,
            # Some clusters send a job's signals to all of its processes: this one is for us, and would kill the run.
            preexec_fn=_ignore_usr2,
        )

        def wait() -> None:
            self._code = self._process.wait()

        threading.Thread(target=wait, daemon=True).start()
        while self._code is None:
            time.sleep(0.1)

    def _outcome(self, first: bool) -> str:
        status = read_status(self.job.directory)
        told = self._code == 0 or status != self._before
        if self.job.is_finished() or (told and status.get("state") == "stopped"):
            return str(status["state"])
        if self._asked:
            return "stopped"
        if (holder := lock_holder(self.job.directory / "lock")) is not None:
            return f"running elsewhere: {holder}"
        failed = status != self._before and status.get("state") == "failed"
        reason = str(status["reason"]) if failed else f"exit status {self._code}: see the job's log"
        if first:
            mark_failed(self.job.directory, reason)
        raise RuntimeError(reason)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        """SIGUSR1 to train.py; a file for ranks, which torchrun leaves no time after a signal."""
        if self._process is None or self._code is not None:
            return
        self._asked = True
        if self.ranks > 1:
            (self.job.directory / STOP_FILE).write_text("the job's time is over\n", encoding="utf-8")
        else:
            os.kill(self._process.pid, signal.SIGUSR1)


def _ignore_usr2() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _first_gpu() -> dict[str, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[0]} if visible else {}


def turns(jobs: Sequence[Job], asked: launch.Job) -> list[ArrayJob]:
    """What is still to be run, by nobody else.

    UserError(s) for mistakes in what is asked of the cluster, and for settings that cannot work on so many ranks.
    """
    grace = max(asked.signal_seconds - 30, 10)
    left = []
    queued = _queued()
    for job in jobs:
        trained = not job.trained or job.is_finished()
        if trained and not (job.timed and not seems_measured(job.directory, job.trained)):
            continue
        if not trained:
            launch.check(asked, load(job.file, job.arguments))
        if lock_holder(job.directory / "lock") is None and _submitted(job) not in queued:
            left.append(ArrayJob(job, asked.ranks, asked.nodes, grace))
    return left


def executor(folder: Path, asked: launch.Job, at_once: int | None, cluster: str = "slurm") -> Any:
    """submitit's, with everything asked of the cluster. UserError without submitit, or without SLURM on this machine."""
    submitit = _submitit()
    if cluster == "slurm" and shutil.which("srun") is None:
        raise UserError(
            "there is no SLURM on this machine: no srun",
            "--slurm",
            "run it where sbatch and srun are; --dry-run shows it",
        )
    made = submitit.AutoExecutor(folder=folder, cluster=cluster, slurm_max_num_timeout=TURNS)
    made.update_parameters(
        name=asked.job_name or "reproduce",
        timeout_min=int(launch.minutes(asked.time)),
        **{
            f"slurm_{key}": value
            for key, value in parameters(asked, at_once).items()
            if key not in ("job_name", "time")
        },
    )
    return made


def parameters(asked: launch.Job, at_once: int | None) -> dict[str, Any]:
    """By submitit's names."""
    cpus = asked.cpus_per_task or launch.CPUS_PER_RANK * asked.ranks_per_node
    others = dict(option.removeprefix("--").partition("=")[::2] for option in asked.sbatch)
    given = {
        "job_name": asked.job_name or "reproduce",
        "time": int(launch.minutes(asked.time)),
        "nodes": asked.nodes,
        "ntasks_per_node": 1,
        "gpus_per_node": asked.gpus_per_node or None,
        "cpus_per_task": cpus,
        "mem": asked.mem,
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "constraint": asked.constraint,
        "signal_delay_s": asked.signal_seconds,
        "stderr_to_stdout": True,
        "setup": list(asked.setup) or None,
        "array_parallelism": at_once,
        # srun no longer takes this over from sbatch (since SLURM 22.05).
        "srun_args": [f"--cpus-per-task={cpus}"],
        "additional_parameters": {"requeue": True, **{key: value or True for key, value in others.items()}},
    }
    return {key: value for key, value in given.items() if value is not None}


def submit(made: Any, waiting: Sequence[ArrayJob]) -> list[Any]:
    """Hand the runs over as one array; its jobs, in order."""
    submitit = _submitit()
    try:
        with made.batch():
            jobs = [made.submit(turn) for turn in waiting]
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        said = str(error).strip().splitlines()[-1]
        raise UserError(f"sbatch refused it: {said}", "--slurm", "change what you ask for") from error
    for turn, job in zip(waiting, jobs, strict=True):
        files.atomic_write(turn.job.directory / "slurm.json", json.dumps({"job": str(job.job_id)}) + "\n")
    return jobs


def shown(folder: Path, asked: launch.Job, at_once: int | None, waiting: Sequence[ArrayJob]) -> Iterator[str]:
    """What would be submitted."""
    _submitit()
    from submitit.slurm.slurm import _make_sbatch_string

    count = {"map_count": len(waiting)} if len(waiting) > 1 else {}
    command = f"{sys.executable} -u -m submitit.core._submit {folder}"
    given: dict[str, Any] = parameters(asked, at_once) | count
    yield _make_sbatch_string(command=command, folder=folder, **given)
    for number, turn in enumerate(waiting):
        yield f"# {number}: {', '.join(turn.job.cells)} seed {turn.job.config.seed} -> {turn.job.directory}"


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise UserError(
            "submitit is not installed",
            "--slurm",
            "pip install 'pkm[slurm]', or from a checkout: pip install -e '.[slurm]'",
        ) from error
    return submitit


def _submitted(job: Job) -> str | None:
    """The job of the cluster that a run was last given to."""
    try:
        return str(json.loads((job.directory / "slurm.json").read_bytes())["job"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _queued() -> set[str | None]:
    """The user's jobs that wait or run."""
    if shutil.which("squeue") is None:
        return set()
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired as late:
        raise UserError("squeue does not answer", "--slurm", "try again when the cluster does") from late
    return {line.strip() for line in asked.stdout.splitlines()}
