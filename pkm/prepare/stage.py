"""A stage of a preparation: tasks that are done when their reports are there, and how far they are.

A task's report, `<stage>/<rank>.json`, is written last and at once. That alone decides what a killed preparation still
has to do; datatrove's own marks of completion follow it.
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pkm.errors import UserError
from pkm.files import atomic_write
from pkm.machine import cpu_seconds, lives, peak_kilobytes

TICK_SECONDS = 1.0
# How long a stage may have tasks left and nobody at work on one before its workers are taken for dead.
IDLE_SECONDS = 60.0


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
    """What a task calls now and then: notes how far it is."""

    def __init__(self, path: Path):
        self._path = path
        self._next = 0.0

    def __call__(self, share: float, words: int) -> None:
        """share: of the task's bytes that are done, 0 to 1; words: read or written so far."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + TICK_SECONDS
        state = {"pid": os.getpid(), "host": socket.gethostname(), "share": min(share, 1.0), "words": words}
        # Nobody is helped by a task that fails because it cannot say how far it is.
        with suppress(OSError):
            self._path.write_text(json.dumps(state))


@dataclass
class Task:
    """A stage as datatrove runs it: a pipeline of a single step that reads, works and writes.

    quiet: datatrove does not log to the terminal; what matters is shown by whoever started it.
    """

    stage: str
    work: Path
    run: Callable[[Path, int, Tick], dict[str, Any]]
    quiet: bool

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Unpickled in a worker, before datatrove has said anything there.
        self.__dict__.update(state)
        if self.quiet:
            silence()

    def __call__(self, data: Any, rank: int, world_size: int) -> None:
        folder = self.work / self.stage
        report, running = folder / f"{rank:05d}.json", folder / "running" / f"{rank:05d}"
        if report.exists():
            return
        tick = Tick(running)
        tick(0, 0)
        began, worked = time.monotonic(), cpu_seconds()
        try:
            result = self.run(self.work, rank, tick)
        except Exception as error:
            _write_failure(folder / "failed" / f"{rank:05d}", error)
            raise RuntimeError(f"task {rank} of {self.stage} failed") from None
        result |= {
            "seconds": time.monotonic() - began,
            "cpu_seconds": cpu_seconds() - worked,
            "peak_kilobytes": peak_kilobytes(),
        }
        atomic_write(report, json.dumps(result))
        running.unlink(missing_ok=True)


def silence() -> None:
    """datatrove logs to the terminal; what matters of it is shown otherwise."""
    from loguru import logger

    logger.disable("datatrove")


class Monitor:
    """Reads what the tasks of a stage write about themselves."""

    def __init__(self, stage: Stage):
        self.stage = stage
        self._done: dict[int, dict[str, Any]] = {}
        self._left = set(range(len(stage.costs)))
        self._busy = time.monotonic()
        self._suspect: set[int] = set()

    def look(self, workers_may_die: bool) -> Progress:
        """How far the stage is. Raises what failed; UserError where a worker is gone."""
        raise_failure(self.stage)
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
        dead = {r for r, s in here.items() if r in self._left and not lives(s["pid"]) and not self._finished(r)}
        if running or not self._left:
            self._busy = time.monotonic()
        idle = time.monotonic() - self._busy > IDLE_SECONDS
        if dead & self._suspect or idle:
            raise UserError(
                f"a worker died without a word while {self.stage.title} (killed, or out of memory?)",
                str(self.stage.work),
                "run the same command again: it goes on where it was; with fewer `workers` if memory is short",
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


def _write_failure(path: Path, error: Exception) -> None:
    user = [error.what, error.where, error.fix] if isinstance(error, UserError) else None
    atomic_write(path, json.dumps({"user": user, "traceback": traceback.format_exc()}))


def raise_failure(stage: Stage) -> None:
    for path in sorted((stage.work / stage.name / "failed").iterdir()):
        if path.name.startswith("."):
            continue
        failure = json.loads(path.read_bytes())
        if failure["user"]:
            raise UserError(*failure["user"])
        raise RuntimeError(f"a task failed while {stage.title}:\n{failure['traceback']}")
