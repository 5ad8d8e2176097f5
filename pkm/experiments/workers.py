"""The processes that run a grid on this machine: one on each group of GPUs, or each on a share of the cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pkm.config.schema import Config
from pkm.distributed.torchrun import ONE_NODE, kill_all
from pkm.errors import UserError
from pkm.experiments.jobs import EVALUATE, SPEED, TRAIN, Job
from pkm.machine import cores
from pkm.run.status import STOP_FILE, read_status


@dataclass(frozen=True)
class Worker:
    """The GPUs or cores that one run at a time uses alone."""

    gpus: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them; none = the CPU."""
    cores: int = 1

    @property
    def ranks(self) -> int:
        return max(len(self.gpus), 1)

    def environment(self, config: Config) -> dict[str, str]:
        threads = config.threads or max(self.cores // self.ranks, 1)
        own = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        if self.gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        return {**os.environ, **own}


def workers(configs: Sequence[Config], gpus: Sequence[str], gpus_per_run: int, jobs: int | None) -> list[Worker]:
    """One for each group of `gpus_per_run` GPUs; without GPUs, as many as there are cores for the runs' threads.

    jobs    as many instead; on GPUs they take turns on the groups

    UserError for more GPUs a run than there are.
    """
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs {jobs} would run nothing", "--jobs", "write at least 1")
    if gpus_per_run < 1:
        raise UserError(f"a run needs at least one GPU, not {gpus_per_run}", "--gpus-per-run", "write at least 1")
    wants_cpu = all(config.device == "cpu" for config in configs)
    if not gpus or wants_cpu:
        if gpus_per_run > 1:
            what = f"{gpus_per_run} GPUs a run, and this machine shows none"
            raise UserError(what, "--gpus-per-run", "leave it out on a CPU")
        threads = max((config.threads or cores() for config in configs), default=1)
        count = jobs or max(cores() // threads, 1)
        return [Worker((), max(cores() // count, 1))] * count
    if gpus_per_run > len(gpus):
        what = f"{gpus_per_run} GPUs a run, and this machine shows {len(gpus)}"
        raise UserError(what, "--gpus-per-run", "ask for fewer")
    groups = [tuple(gpus[i : i + gpus_per_run]) for i in range(0, len(gpus) - gpus_per_run + 1, gpus_per_run)]
    count = jobs or len(groups)
    return [Worker(groups[i % len(groups)], max(cores() // count, 1)) for i in range(count)]


def train_command(job: Job, ranks: int) -> list[str]:
    """The command that trains a job on this machine."""
    several = ["-m", "torch.distributed.run", *ONE_NODE, f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *several, str(TRAIN), str(job.file), *job.arguments]


def speed_command(job: Job) -> list[str]:
    return [sys.executable, str(SPEED), str(job.file), *job.arguments]


def facts_command(job: Job) -> list[str]:
    """The command that asks a trained job for facts."""
    where = ["--corpus", str(job.config.corpus.path), "--device", job.config.device]
    return [sys.executable, str(EVALUATE), str(job.directory), "--facts", *where]


@dataclass
class RunProcess:
    """A process that trains, measures or asks a job; its output goes to a file."""

    job: Job
    worker: Worker
    command: list[str]
    output: Path
    asked: bool = False
    """Whether it was asked to stop."""
    process: subprocess.Popen[bytes] = field(init=False)
    _status: dict[str, Any] = field(init=False)
    _begins: int = field(init=False)

    def __post_init__(self) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._status = read_status(self.job.directory)
        with self.output.open("ab") as file:
            file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            self._begins = file.tell()
            # A session of its own, so that a Ctrl-C on the terminal reaches only this process, which passes it on once.
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env=self.worker.environment(self.job.config),
            )  # fmt: skip

    def ask_to_stop(self) -> None:
        """Ask it, once, to save and end. torchrun gives its ranks no time after a signal, so they get a file STOP instead."""
        if self.asked or self.process.poll() is not None:
            return
        self.asked = True
        if self.worker.ranks > 1:
            (self.job.directory / STOP_FILE).write_text("the grid was told to stop\n", encoding="utf-8")
        else:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        kill_all(self.process.pid)

    def ended(self) -> bool:
        if self.process.poll() is None:
            return False
        if self.asked and self.worker.ranks > 1:
            (self.job.directory / STOP_FILE).unlink(missing_ok=True)
        return True

    def reason(self) -> str:
        """Why it failed: as its status says, else its last lines."""
        status, code = read_status(self.job.directory), self.process.returncode
        if status != self._status and status.get("state") == "failed":
            return str(status.get("reason"))
        if code < 0:
            name = signal.Signals(-code).name
            return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        lines = [line for line in self.said().splitlines() if line.strip()]
        first = max((n for n, line in enumerate(lines) if line.startswith("error:")), default=max(len(lines) - 3, 0))
        return "\n".join(lines[first : first + 6]).removeprefix("error: ") or f"exit status {code}"

    def said(self) -> str:
        """The end of what it printed."""
        with self.output.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._begins, size - 20_000))
            return file.read().decode("utf-8", "replace")
