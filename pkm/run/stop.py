"""Whether a run was asked to stop: by a signal to any rank, by a file, or from inside."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as td

from pkm.distributed.dist import is_main, world_size
from pkm.run.status import STOP_FILE

# Why a run was told to stop. Ranks agree on the largest position in this list, so a later reason wins over an earlier one.
REASONS = (None, "time limit", f"{STOP_FILE} file", "SIGUSR1", "SIGINT", "SIGTERM", "failed save")
# A Ctrl-C reaches a rank twice, from the terminal and from torchrun: within so many seconds both count as one.
SAME_CTRL_C_SECONDS = 5.0


class Stopped(Exception):
    """The run was asked to stop; says why."""


class StopFlag:
    """Whether the run was asked to stop: by a signal to any rank, or by a file `STOP` in its directory.

    The first Ctrl-C asks; a second one interrupts at once with KeyboardInterrupt. A rank of torchrun, which may hear one
    twice, counts those of SAME_CTRL_C_SECONDS as one.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.reason: str | None = None
        self._interrupted_at: float | None = None
        self._echo = SAME_CTRL_C_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else 0.0

    def install(self) -> StopFlag:
        """Take over SIGTERM, SIGINT and SIGUSR1; call it from the main thread."""
        for number in self.SIGNALS:
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT":
            now = time.monotonic()
            if self._interrupted_at is not None and now - self._interrupted_at >= self._echo:
                raise KeyboardInterrupt
            self._interrupted_at = self._interrupted_at or now
        self.ask(name)

    def ask(self, reason: str) -> None:
        """Ask for a stop from inside the run; `reason` is one of REASONS."""
        if REASONS.index(reason) > REASONS.index(self.reason):
            self.reason = reason

    def requested(self, run_directory: Path) -> str | None:
        """Why the run has to stop (one of REASONS), or None.

        Every rank must call it at the same point; all get the same answer.
        """
        own = self.position(run_directory)
        if world_size() == 1:
            return REASONS[own]
        agreed = torch.tensor(own)
        td.all_reduce(agreed, op=td.ReduceOp.MAX)
        return REASONS[int(agreed)]

    def position(self, run_directory: Path) -> int:
        """The place in REASONS of why this rank thinks that the run has to stop: for ranks that tell it with what they tell anyway."""
        if self.reason is None and is_main() and (run_directory / STOP_FILE).exists():
            return REASONS.index(f"{STOP_FILE} file")
        return REASONS.index(self.reason)

    def check(self, run_directory: Path) -> None:
        """Stopped if `requested`. Every rank must call it at the same point."""
        reason = self.requested(run_directory)
        if reason is not None:
            raise Stopped(reason)
