"""The runs that grids need: each is listed once, however many tables show it, with its state on disk.

All cells of the first seed come before those of the second, so that a grid cut short has a whole table to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pkm.config.load import flatten
from pkm.config.rules import impossible_for
from pkm.config.schema import Config
from pkm.corpus.store import open_corpus
from pkm.corpus.words import NO_WORDS
from pkm.device import pick_device, pick_precision
from pkm.errors import UserError
from pkm.experiments.grid import Cell, Grid
from pkm.run.status import is_finished

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
SPEED = TRAIN.parent / "scripts" / "speed.py"
EVALUATE = TRAIN.parent / "scripts" / "evaluate.py"


@dataclass
class Job:
    """One run, for every cell that shows it."""

    config: Config
    file: Path
    arguments: tuple[str, ...]
    """`train.py FILE ARGUMENTS` is the run, `speed.py FILE ARGUMENTS` measures its words a second."""
    cells: list[str]
    """table2/no-memory, ..."""
    trained: bool
    timed: bool
    """Whether its words a second are measured with nothing else at work."""
    recall: bool = False
    """Whether it is asked for facts once it is trained."""
    changed: tuple[str, ...] = ()
    """The settings that tell it from the other cells of its first grid."""

    @property
    def directory(self) -> Path:
        return self.config.directory

    @property
    def title(self) -> str:
        return f"{self.cells[0]} seed {self.config.seed}"

    def is_finished(self) -> bool:
        """Whether it is trained and has its report."""
        return is_finished(self.directory, self.config.optim.steps)

    def saved_step(self) -> int:
        """Where it would go on: the step of its newest checkpoint; 0 without one."""
        try:
            name = (self.directory / "checkpoints" / "latest").read_text(encoding="utf-8")
        except OSError:
            return 0
        digits = name.strip().rpartition("-")[2]
        return int(digits) if digits.isdecimal() else 0


def list_jobs(grids: Sequence[Grid], seeds: Sequence[int]) -> list[Job]:
    """The runs of all grids, in the order in which they are run. A cell that is not trained has one, of the first seed."""
    found: dict[Path, Job] = {}
    for seed in seeds:
        for grid in grids:
            for cell, changed in zip(grid.cells, differing([cell.config for cell in grid.cells]), strict=True):
                if cell.trained or seed == seeds[0]:
                    _add(found, grid, cell, seed, changed)
    return list(found.values())


def _add(found: dict[Path, Job], grid: Grid, cell: Cell, seed: int, changed: tuple[str, ...]) -> None:
    config, arguments = cell.run(seed)
    new = Job(config, cell.file, arguments, [], trained=False, timed=False, changed=changed)
    job = found.setdefault(config.directory, new)
    job.cells.append(f"{grid.name}/{cell.name}")
    job.trained |= cell.trained
    job.timed |= "kwords_per_s" in grid.settings.measures
    job.recall |= cell.trained and "recall" in grid.settings.measures


def differing(configs: Sequence[Config]) -> list[tuple[str, ...]]:
    """Of each config the settings that it does not share with all others, as `key=value`."""
    trees = [flatten(config.model_dump(mode="json", exclude={"name", "seed"})) for config in configs]
    flat = [{key: str(value) for key, value in tree.items()} for tree in trees]
    # A dense model has nothing to say of a memory's settings; of another section that only some have, it says that it has none.
    several = {
        key
        for one in flat
        for key in one
        if len({other.get(key, one[key] if key.startswith("memory") else "None") for other in flat}) > 1
    }
    some_dense = any(config.memory for config in configs)
    return [
        ("memory=null",) * (config.memory is None and some_dense)
        + tuple(f"{key}={value}" for key, value in one.items() if key in several and value != "None")
        for config, one in zip(configs, flat, strict=True)
    ]


def check(jobs: Sequence[Job], ranks: int, here: bool = True) -> None:
    """Raise, before anything runs, the errors that every run would meet.

    here    they will run on this machine

    UserError for a corpus that is not prepared, has nothing to score, or no text to find facts in where recall is asked for, for
    a device or precision that this machine does not have, and for a batch that the ranks cannot share.
    """
    for path in dict.fromkeys(job.config.corpus.path for job in jobs):
        try:
            corpus = open_corpus(path)
        except UserError as error:
            raise UserError(error.what, error.where, f"{error.fix}; --corpus names another one") from error
        for name in ("train", "valid", "test"):
            if corpus.split(name) is None:
                fix = "prepare it with more documents, or name another one with --corpus"
                raise UserError(f"the corpus has no {name} split", str(path), fix)
        if not corpus.decodes and any(job.recall and job.config.corpus.path == path for job in jobs):
            raise UserError(f"no facts: {NO_WORDS}", str(path), "leave recall out of the grid's measures")
    for job in jobs:
        if here:
            pick_precision(job.config, pick_device(job.config))
        for key, what, fix in impossible_for(job.config, ranks):
            raise UserError(f"{job.title}: {key}: {what}", str(job.file), fix)
