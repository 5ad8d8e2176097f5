"""status.json and report.json of a run: where it stands, and what it scored; and the file STOP, which asks it to stop."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pkm import files
from pkm.errors import UserError
from pkm.machine import lives

State = Literal["running", "stopped", "finished", "failed"]
STOP_FILE = "STOP"


def read_status(directory: Path) -> dict[str, Any]:
    """What status.json says; empty if there is none that can be read, or it holds what a status cannot."""
    said = files.read_json(directory / "status.json") or {}
    kinds = {"state": str, "step": int, "checkpoint": int, "pid": int}
    return said if all(isinstance(said.get(key, kind()), kind) for key, kind in kinds.items()) else {}


def is_interrupted(status: dict[str, Any]) -> bool:
    """Whether a status says "running" of a process that is gone. Of one on another machine nobody can tell."""
    here = status.get("host") == socket.gethostname()
    return status.get("state") == "running" and here and not lives(status.get("pid", 0))


def write_status(directory: Path, state: State, step: int, reason: str | None, checkpoint: int | None = None) -> None:
    """checkpoint    step of the newest checkpoint that was written; `step`, if not given"""
    status = {
        "state": state,
        "step": step,
        "reason": reason,
        "checkpoint": step if checkpoint is None else checkpoint,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    files.atomic_write(directory / "status.json", files.json_text(status, indent=1))


def newest_checkpoint(status: dict[str, Any]) -> int:
    """Step of a checkpoint that was written, according to a status; 0 if perhaps none was."""
    # Earlier versions did not write it. Their "failed" may be at a step before the first checkpoint.
    return int(status.get("checkpoint", 0 if status.get("state") == "failed" else status.get("step", 0)))


def mark_failed(directory: Path, reason: str) -> None:
    """Write into status.json why a run failed, for a process that could not do it: killed, or refused before it began."""
    status = read_status(directory)
    if status.get("state") != "finished" and (status.get("state"), status.get("reason")) != ("failed", reason):
        with suppress(OSError, UserError):
            write_status(directory, "failed", status.get("step", 0), reason, newest_checkpoint(status))


def read_report(directory: Path) -> dict[str, Any] | None:
    """What report.json says; None if there is none that can be read."""
    report = files.read_json(directory / "report.json")
    return report if report and isinstance(report.get("evaluation"), dict) else None


def is_finished(directory: Path, steps: int) -> bool:
    """Whether a run of that many steps is trained and has its report."""
    status = read_status(directory)
    done = status.get("state") == "finished" and status.get("step", 0) >= steps
    return done and read_report(directory) is not None
