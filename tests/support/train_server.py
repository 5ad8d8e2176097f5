"""Real runs of train.py, in processes of their own, without the seconds that imports take: a server forks them.

`python -m tests.support.train_server` is the server; it imports what train.py will, then forks one process a job. Jobs can be killed,
signalled, limited and watched like any process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.fork import without_root

REPOSITORY = Path(__file__).resolve().parents[2]
# What a run imports only when it gets there (torch._dynamo with its first optimizer): together several seconds.
IMPORTED_LATE = (
    "train",
    "pkm.train.loop",
    "pkm.evaluation.report",
    "torch._dynamo",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.summary.writer.record_writer",
)


LONGEST_SECONDS = 400


@dataclass(frozen=True)
class Ended:
    code: int
    """Exit status; -N if signal N killed it."""
    out: str
    err: str


class Job:
    def __init__(self, server: Server, pid: int, out: int, err: Path):
        self.server, self.pid, self.err = server, pid, err
        self.out = os.fdopen(out)
        self.heard: list[str] = []
        # One that hangs is one failure, and not the end of all tests.
        self.impatience = threading.Timer(LONGEST_SECONDS, self.kill)
        self.impatience.daemon = True
        self.impatience.start()

    def until(self, text: str) -> str:
        """Wait for a line with `text` in it on the standard output. AssertionError if the job ends without it."""
        for line in self.out:
            self.heard.append(line)
            if text in line:
                return line
        raise AssertionError(f"{text!r} was never said: {''.join(self.heard)}{self.err.read_text()}")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Unless it has ended."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)

    def wait(self) -> Ended:
        self.heard += self.out
        return self.ended(self.server.ask(wait=[self.pid])[1])

    def ended(self, code: int) -> Ended:
        self.impatience.cancel()
        return Ended(code, "".join(self.heard), self.err.read_text())


class Ranks:
    """Several processes of one job."""

    GRACE_SECONDS = 120

    def __init__(self, jobs: list[Job]):
        self.jobs = jobs

    def signal(self, number: int) -> None:
        for job in self.jobs:
            with suppress(ProcessLookupError):
                job.signal(number)

    def wait(self) -> list[Ended]:
        """As torchrun: when one of them fails the others get SIGTERM, and after `GRACE_SECONDS` SIGKILL."""
        hearing = [threading.Thread(target=lambda job=job: job.heard.extend(job.out)) for job in self.jobs]
        for thread in hearing:
            thread.start()
        codes: dict[int, int] = {}
        last_resort = threading.Timer(self.GRACE_SECONDS, self.signal, [signal.SIGKILL])
        while len(codes) < len(self.jobs):
            pid, code = self.jobs[0].server.ask(wait=[job.pid for job in self.jobs if job.pid not in codes])
            codes[pid] = code
            if code != 0 and not last_resort.is_alive():
                last_resort.start()
                for job in self.jobs:
                    if job.pid not in codes:
                        job.signal(signal.SIGTERM)
        last_resort.cancel()
        for thread in hearing:
            thread.join()
        return [job.ended(codes[job.pid]) for job in self.jobs]


class Server:
    """The client's end of the server."""

    def __init__(self, scratch: Path):
        self.scratch, self.jobs = scratch, 0
        command = [sys.executable, "-m", "tests.support.train_server"]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, *arguments: str, program: str = "train", **options: Any) -> Job:
        """Run train.py, or the module `program` of the repository, with these arguments.

        environment    dict of variables to set
        when           {"kind": "train", "step": 9, "signals": ["SIGTERM"], "touch": path}: once that record is written,
                       the process gets these signals and that file is made; with {"said": text} instead of a step,
                       once that was said (every rank says it, rank 0 aloud); with "raises": text it fails with that,
                       with "held": true it waits in C from then on, as for a GPU; with "dies_after": 9 it is killed at its
                       ninth call of a function, or return from one, after that record, or after its start with step 0
        nan            number of a step in which this process finds a loss that is no number
        clock_runs_backwards
        file_size      most bytes a file may have
        ordinary       without root's powers
        """
        self.jobs += 1
        out, err = self.scratch / f"{self.jobs}.out", self.scratch / f"{self.jobs}.err"
        os.mkfifo(out)
        err.touch()  # a job that is killed at once has made none
        reader = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
        pid = self.ask(arguments=arguments, program=program, out=str(out), err=str(err), **options)
        os.set_blocking(reader, True)
        return Job(self, pid, reader, err)

    def run(self, *arguments: str, **options: Any) -> Ended:
        return self.start(*arguments, **options).wait()

    def start_ranks(self, ranks: int, *arguments: str, on: dict[int, dict[str, Any]] | None = None) -> Ranks:
        """Run train.py on that many ranks; `on[r]` are the options of rank r, as those of `start`."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        jobs = []
        for rank in range(ranks):
            options = dict((on or {}).get(rank, {}))
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **common, **options.pop("environment", {})}
            jobs.append(self.start(*arguments, environment=own, **options))
        return Ranks(jobs)

    def close(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait()


def _serve() -> None:
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    importlib.import_module("pkm.machine").code_version()
    gc.collect()
    gc.freeze()  # what is imported is garbage in no job
    ended: dict[int, int] = {}
    for line in sys.stdin:
        request, answer = json.loads(line), None
        if "wait" in request:
            while not ended.keys() & request["wait"]:
                pid, status = os.wait()
                ended[pid] = os.waitstatus_to_exitcode(status)
            first = next(pid for pid in ended if pid in request["wait"])
            answer = [first, ended.pop(first)]
        else:
            out = os.open(request["out"], os.O_WRONLY)
            answer = os.fork()
            if answer == 0:
                _job(request, out)
            os.close(out)
        print(json.dumps(answer), flush=True)


def _job(request: dict[str, Any], out: int) -> None:
    code = 1
    try:
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(os.open(request["err"], os.O_WRONLY | os.O_CREAT, 0o644), 2)
        os.environ.update(request.get("environment", {}))
        if "file_size" in request:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"], resource.RLIM_INFINITY))
        if "when" in request:
            _arrange(**request["when"])
        if "nan" in request:
            _spoil_loss(request["nan"])
        if request.get("clock_runs_backwards"):
            now, calls = time.time(), itertools.count()
            time.time = lambda: now - 86_400 * next(calls)
        program = importlib.import_module(request["program"])
        if request.get("ordinary"):
            without_root()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = [request["program"], *request["arguments"]]
        code = program.main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _arrange(
    step: int = 0,
    kind: str = "train",
    said: str | None = None,
    signals: tuple[str, ...] = (),
    touch: str | None = None,
    raises: str | None = None,
    held: bool = False,
    dies_after: int | None = None,
) -> None:
    from pkm.run.metrics import Metrics
    from pkm.run.run import Run

    def act() -> None:
        if touch is not None:
            Path(touch).touch()
        for name in signals:
            os.kill(os.getpid(), signal.Signals[name])
        while held:
            ctypes.CDLL(None).sleep(1000)
        if raises is not None:
            raise RuntimeError(raises)
        if dies_after is not None:
            _die_after(dies_after)

    write, say = Metrics.write, Run.say

    def write_and_act(self: Metrics, at: int, what: Any, **values: Any) -> None:
        write(self, at, what, **values)
        if (at, what) == (step, kind):
            act()

    def say_and_act(self: Run, line: str) -> None:
        say(self, line)
        if said is not None and said in line:
            act()

    if dies_after is not None and step == 0:
        return _die_after(dies_after)
    Metrics.write, Run.say = write_and_act, say_and_act  # type: ignore[method-assign]


def _die_after(calls: int) -> None:
    """A moment that is the same each time, however fast the machine; of all threads together."""
    left = itertools.count(calls - 1, -1)

    def look(frame: Any, event: str, argument: Any) -> None:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(look)
    sys.setprofile(look)


def _spoil_loss(step: int) -> None:
    from pkm.train import step as training_step

    backward, steps = training_step.backward, itertools.count(1)

    def spoilt(*before: Any, **of_warm_up: Any) -> Any:
        if of_warm_up:
            return backward(*before, **of_warm_up)
        *others, scale, measures = before
        return backward(*others, float("nan") if next(steps) == step else scale, measures)

    training_step.backward = spoilt


if __name__ == "__main__":
    _serve()
