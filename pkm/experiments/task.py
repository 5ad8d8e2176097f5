"""A job while its grid is being run, and how far its run is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pkm.experiments.jobs import Job
from pkm.run import metrics
from pkm.run.status import read_report

State = Literal["waiting", "running", "timing", "asking", "finished", "stopped", "failed", "elsewhere"]


@dataclass
class Task:
    """A job while a grid is being run."""

    job: Job
    state: State = "waiting"
    reason: str = ""
    """Why it failed or stopped, or where it is at work."""
    before: bool = False
    """It had been finished before."""
    progress: Progress = field(default_factory=lambda: Progress())
    result: dict[str, Any] = field(default_factory=dict)
    """report.json of a finished one."""

    def look(self) -> None:
        """Read what its run has said since the last look."""
        self.progress.read(self.job.directory)

    def take_report(self) -> None:
        self.result = read_report(self.job.directory) or {}


@dataclass
class Progress:
    """The newest training record of a run."""

    step: int = 0
    loss: float | None = None
    speeds: list[float] = field(default_factory=list)
    """Tokens a second of every record after the first, which holds what is slow only once."""
    _offset: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """The median of the newest records."""
        newest = sorted(self.speeds[-9:])
        return newest[len(newest) // 2] if newest else None

    def read(self, directory: Path) -> None:
        path = directory / metrics.FILE
        try:
            with path.open("rb") as file:
                if path.stat().st_size < self._offset:  # a run that goes on cuts off what its checkpoint had not seen
                    self._offset = 0
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for record in metrics.records(whole.splitlines(keepends=True)):
            if record.get("kind") == "train":
                self.step, self.loss = record["step"], record.get("loss")
                if record["step"] > 1 and record.get("tokens_per_second"):
                    self.speeds.append(record["tokens_per_second"])
