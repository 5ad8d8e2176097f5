"""A stage of a preparation: tasks that are done when their reports are there, and how far they are.

A task's report, `<stage>/<rank>.json`, is written last and at once. That alone decides what a killed preparation still
has to do; datatrove's own marks of completion follow it.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pkm.errors import UserError
from pkm.files import atomic_write
from pkm.machine import cpu_seconds, peak_kilobytes

TICK_SECONDS = 1.0


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
        state = {"pid": os.getpid(), "share": min(share, 1.0), "words": words}
        # A task must not fail only because it cannot say how far it is.
        with suppress(OSError):
            self._path.write_text(json.dumps(state))


@dataclass(frozen=True)
class Task:
    """One task of a stage, done unless its report is there; callable as datatrove calls a step of a pipeline."""

    stage: str
    work: Path
    run: Callable[[Path, int, Tick], dict[str, Any]]

    @classmethod
    def of(cls, stage: Stage) -> Task:
        return cls(stage.name, stage.work, stage.run)

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
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


class Monitor:
    """Reads what the tasks of a stage write about themselves."""

    def __init__(self, stage: Stage):
        self.stage = stage
        self._done: dict[int, dict[str, Any]] = {}
        self._left = set(range(len(stage.costs)))

    def look(self) -> Progress:
        """How far the stage is. Raises the error of a task that failed."""
        raise_failure(self.stage)
        for rank in [rank for rank in self._left if self.stage.report(rank).exists()]:
            self._left.discard(rank)
            self._done[rank] = json.loads(self.stage.report(rank).read_bytes())
        done = list(self._done.values())
        words = sum(report.get("words", 0) for report in done)
        progress = Progress(done, sum(self.stage.costs[rank] for rank in self._done), words)
        for rank, state in _running(self.stage).items():
            if rank in self._left:
                progress.bytes_done += self.stage.costs[rank] * state["share"]
                progress.words += state["words"]
        return progress


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
