"""One turn of a SLURM job: what its sbatch file starts, on the first of its nodes. It looks after a run until that is finished,
failed, or told to stop in time, and then has the job requeued if there is more to do.

    python -m pkm.slurm.turn --train CONFIG [key=value ...]

How a run hears that it is to stop: when its time is nearly over SLURM tells this program alone (`--signal=B:USR1@...`), when it is
preempted with time to save in the job's steps alone, and when it is cancelled both. torchrun would die of a signal, with a
traceback, and kill its ranks after 30 seconds, saved or not. So it is started with these signals ignored; its ranks inherit that, and
handle them as soon as they can save. This program passes a signal on as a file STOP: all ranks see that at the same step, on any
number of nodes, and have all of the grace to save in.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from pkm import files
from pkm.config.schema import load
from pkm.distributed.torchrun import ONE_NODE, kill_all
from pkm.errors import exits_cleanly
from pkm.run.lock import lock_holder
from pkm.run.status import STOP_FILE, is_finished, mark_failed, read_status

ROOT = Path(__file__).resolve().parents[2]
RESTARTS = 3
"""Times that torchrun starts the ranks again when one dies."""
OUR_STOP = "SLURM job "
"""How a file STOP of this program begins; any other is a user's."""
DEAF = "trap '' TERM INT HUP USR1 USR2; exec "


class Turn:
    """The run of `train.py CONFIG OVERRIDES`, as far as one turn of a job gets.

    ranks            of each node
    grace_seconds    to save in, once told to stop
    """

    def __init__(self, config: str, overrides: Sequence[str], ranks: int, grace_seconds: float):
        self.arguments = [config, *overrides]
        self.config = load(config, overrides).config
        self.directory = self.config.directory
        self.ranks, self.grace_seconds = ranks, grace_seconds
        self.job = os.environ["SLURM_JOB_ID"]
        self.restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        self.nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        self.asked: str | None = None
        """The signal that came."""
        self._deadline: float | None = None
        """When the grace is over; None before the run was told."""

    def listen(self) -> None:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or signal.Signals(number).name

    def say(self, line: str) -> None:
        print(f"{time.strftime('%F %T')} job {self.job}: {line}", flush=True)

    def train(self, doctor: bool) -> int | None:
        """Train; the job's exit status, or None if the run is finished. With `doctor`, on nodes that it finds fit only."""
        if is_finished(self.directory, self.config.optim.steps):
            return None
        self._remove_stop()  # of a job that was killed while it waited for the run to stop
        before = read_status(self.directory)
        where = f"{self.ranks} ranks on each of {self.nodes} nodes"
        self.say(f"{self.directory}, {where}, restart {self.restart} of this job")
        if doctor:
            code = self._run(self._torchrun("doctor", ROOT / "scripts" / "doctor.py"))
            if code and not self.asked:
                return code
        # A rank that dies is started again, with all the others, from the newest checkpoint.
        code = self._run(self._torchrun("train", f"--max-restarts={RESTARTS}", ROOT / "train.py"))
        self._remove_stop()
        return self._outcome(before, code)

    def measure_speed(self, trained: bool) -> int | None:
        """Measure words a second if that is still to be done; as `_measure`."""
        from pkm.evaluation.speed import seems_measured  # brings torch

        done = seems_measured(self.directory, trained)
        return None if done else self._measure("words a second", "speed.py", *self.arguments)

    def ask_for_facts(self) -> int | None:
        """The same for recall."""
        from pkm.evaluation.recall import is_asked  # brings torch

        return (
            None if is_asked(self.directory) else self._measure("recall", "evaluate.py", str(self.directory), "--facts")
        )

    def _measure(self, what: str, program: str, *arguments: str) -> int | None:
        """Run a program of scripts/ on the first GPU; the job's exit status, or None if it ended well."""
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
        gpu = {"CUDA_VISIBLE_DEVICES": first} if first else {}
        code = self._run(["python", str(ROOT / "scripts" / program), *arguments], **gpu)
        self._remove_stop()
        if self.asked:
            return self._requeue()
        if code:
            self.say(f"{what} could not be measured: see above")
        return code or None

    def _torchrun(self, step: str, *arguments: str | Path) -> list[str]:
        """A step of the job, one torchrun a node."""
        program = 'python -m torch.distributed.run "$@"'
        where: list[str] = [*ONE_NODE]
        if self.nodes > 1:
            # Who hosts the meeting is said, since nodes do not always know themselves by the name that the first is called by.
            program = 'python -m torch.distributed.run --rdzv-conf "is_host=$((SLURM_NODEID == 0))" "$@"'
            where = [
                f"--nnodes={self.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={self._meeting()}",
                f"--rdzv-id={self.job}.{self.restart}.{step}",
            ]  # fmt: skip
        return [
            # If the torchrun of one node gives up, those of the others would wait for it: they are ended too.
            "srun", f"--nodes={self.nodes}", f"--ntasks={self.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1",
            *(["--label"] if self.nodes > 1 else []),
            "bash", "-c", DEAF + program, "bash",
            *where, f"--nproc-per-node={self.ranks}", *map(str, arguments), *self.arguments,
        ]  # fmt: skip

    def _meeting(self) -> str:
        """Where the ranks of many nodes meet: at the first, which is this one, at a port that other jobs are unlikely to choose."""
        listed = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        first = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()[0]
        port = 10000 + int(self.job) % 20000  # below those that the system hands out
        while _is_taken(port):
            port += 1
        return f"{first}:{port}"

    def _run(self, command: list[str], **environment: str) -> int | None:
        """Run a command to its end; its exit status. None if it was not begun, or did not end within the grace."""
        if self.asked:
            return None
        cores = os.environ.get("SLURM_CPUS_PER_TASK", "1")
        own = {
            "PYTHONUNBUFFERED": "1",
            # By itself every rank would start as many threads as there are cores.
            "OMP_NUM_THREADS": str(self.config.threads or max(int(cores) // self.ranks, 1)),
            # srun no longer takes this over from sbatch (since SLURM 22.05).
            "SRUN_CPUS_PER_TASK": cores,
            # torchrun must handle one: this is sent by nobody but its user. The others stay ignored, see DEAF.
            "PET_SIGNALS_TO_HANDLE": "SIGQUIT",
        }
        process = subprocess.Popen(command, env={**own, **os.environ, **environment})
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=0.5)
            if self.asked and self._deadline is None:
                self._deadline = time.monotonic() + self.grace_seconds
                self.say(f"{self.asked}: asking the run to save and stop")
                self._write_stop()
                if command[0] != "srun":  # it has nothing to save
                    kill_all(process.pid)
            elif self._deadline is not None and time.monotonic() > self._deadline:
                self.say(f"the run did not stop within {self.grace_seconds:g} s")
                kill_all(process.pid)
                return None

    def _outcome(self, before: dict[str, Any], code: int | None) -> int | None:
        """The job's exit status, as the run ended; None if it is finished. A job whose run was stopped is requeued."""
        status = read_status(self.directory)
        state, step = status.get("state"), status.get("step", 0)
        if state == "finished" and code == 0:
            return None
        if status == before:  # what an earlier turn left there says nothing about this one
            state = None
        if state == "stopped" and not self.asked and status.get("reason") == f"{STOP_FILE} file":
            self.say(f"stopped at step {step} by a file STOP that somebody wrote: submit the job again to go on")
            return 0
        if state == "stopped":
            self.say(f"stopped at step {step} ({status.get('reason')})")
            return self._requeue()
        if state == "failed":
            self.say(f"failed at step {step}; not requeued: see {self.directory / 'log.txt'}")
        # Killed before it could say anything. Out of time, it may go on from its newest checkpoint, unless that is where it
        # was the last time too.
        elif self.asked and self._progressed():
            self.say(f"out of time; the run goes on from checkpoint {self._newest()}")
            return self._requeue()
        elif (holder := lock_holder(self.directory / "lock")) is not None:
            self.say(f"at work elsewhere: {holder}")
        else:
            reason = f"ended with status {code}" + (", a second time without progress" if self.asked else "")
            self.say(f"{reason}; not requeued")
            mark_failed(self.directory, f"{reason}: see the job's log")
        return code or 1

    def _newest(self) -> str:
        with suppress(OSError):
            return (self.directory / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
        return "none"

    def _progressed(self) -> bool:
        """Whether there is another checkpoint than when a turn ended like this the last time; remembers which there is."""
        path = self.directory / "slurm" / "out-of-time"
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        files.atomic_write(path, self._newest())
        return before != self._newest()

    def _requeue(self) -> int:
        shown = subprocess.run(["scontrol", "show", "job", self.job], capture_output=True, text=True).stdout
        found = re.search(r"JobState=(\w+)", shown)
        if found and found[1] != "RUNNING":
            self.say(f"not requeued by this program: the job is {found[1]} (cancelled, or SLURM itself requeues it)")
        elif subprocess.run(["scontrol", "requeue", self.job]).returncode == 0:
            self.say("requeued")
        else:
            self.say("SLURM refuses to requeue: submit the job again to go on")
            return 1
        return 0

    def _write_stop(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / STOP_FILE).write_text(f"{OUR_STOP}{self.job}, {self.asked}\n", encoding="utf-8")
        except OSError as error:
            self.say(f"cannot write {self.directory / STOP_FILE}: {error.strerror}")

    def _remove_stop(self) -> None:
        """Unless a user wrote it."""
        path = self.directory / STOP_FILE
        with suppress(OSError):
            if path.read_text(encoding="utf-8").startswith(OUR_STOP):
                path.unlink()


def _is_taken(port: int) -> bool:
    with socket.socket() as there:
        return there.connect_ex(("127.0.0.1", port)) == 0


@exits_cleanly
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("config", help="a run's YAML file")
    add("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    add("--ranks", type=int, default=1, help="of each node (default: %(default)s)")
    grace = "to save in, once told to stop (default: %(default)s)"
    add("--grace", type=float, default=570, metavar="SECONDS", help=grace)
    add("--doctor", action="store_true", help="have scripts/doctor.py look at the ranks before they train")
    add("--train", action="store_true", help="train, until finished or told to stop")
    add("--speed", action="store_true", help="then measure words a second, on the first GPU")
    add("--facts", action="store_true", help="then ask it for facts, on the first GPU")
    args = parser.parse_intermixed_args()
    turn = Turn(args.config, args.overrides, args.ranks, args.grace)
    turn.listen()
    code = turn.train(args.doctor) if args.train else None
    if code is None and args.speed:
        code = turn.measure_speed(args.train)
    if code is None and args.facts:
        code = turn.ask_for_facts()
    if code is None:
        turn.say(f"finished: {turn.directory}")
    return code or 0


if __name__ == "__main__":
    raise SystemExit(main())
