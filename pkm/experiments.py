"""Several configs, one run each, one after another: what is finished is not run again, what fails does not stop the others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pkm.config import Config, load
from pkm.errors import UserError, UserErrors
from pkm.run import read_status

TRAIN = Path(__file__).resolve().parent.parent / "train.py"


@dataclass(frozen=True)
class Cell:
    """One run of a grid: the file and overrides that make its config."""

    file: Path
    overrides: tuple[str, ...]
    config: Config

    def is_finished(self) -> bool:
        status = read_status(self.config.directory)
        return status.get("state") == "finished" and status.get("step", 0) >= self.config.optim.steps

    def report(self) -> dict[str, Any] | None:
        """What its report.json holds; None if there is none yet."""
        path = self.config.directory / "report.json"
        return json.loads(path.read_text()) if path.is_file() else None


@dataclass(frozen=True)
class Outcome:
    cell: Cell
    state: str
    """finished | stopped | failed"""
    reason: str = ""


def cells(files: Sequence[Path], overrides: Sequence[str]) -> list[Cell]:
    """A cell for each file; UserErrors with every mistake of all of them, and for two that would share a run directory."""
    found: list[Cell] = []
    errors: list[UserError] = []
    for file in files:
        try:
            found.append(Cell(file, tuple(overrides), load(file, overrides).config))
        except UserError as error:
            errors.append(error)
    owners: dict[Path, Cell] = {}
    for cell in found:
        other = owners.setdefault(cell.config.directory, cell)
        if other is not cell:
            what = f"has the run directory {cell.config.directory} of {other.file}"
            errors.append(UserError(what, str(cell.file), "give each a name of its own"))
    if errors:
        raise UserErrors(f"{len(errors)} of {len(files)} configs cannot be run", errors)
    return found


def run(grid: Sequence[Cell], say: Callable[[str], None] = print) -> list[Outcome]:
    """Run what is not finished, in order. A run that was told to stop ends the grid: the same call goes on from there."""
    outcomes = []
    for number, cell in enumerate(grid, start=1):
        title = f"[{number}/{len(grid)}] {cell.config.name}"
        if cell.is_finished():
            say(f"{title}: finished already")
            outcomes.append(Outcome(cell, "finished"))
            continue
        say(title)
        code = subprocess.run([sys.executable, str(TRAIN), str(cell.file), *cell.overrides]).returncode
        status = read_status(cell.config.directory)
        state = "finished" if cell.is_finished() else "stopped" if code == 0 else "failed"
        outcomes.append(Outcome(cell, state, str(status.get("reason") or f"exit status {code}")))
        if state == "stopped":
            break
    return outcomes
