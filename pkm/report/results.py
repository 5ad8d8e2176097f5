"""What the runs of a grid have found so far: every cell with its seeds, whether finished, failed or not run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pkm.config.schema import Config
from pkm.evaluation.recall import nats_saved, read_facts
from pkm.evaluation.speed import read_speed
from pkm.experiments.grid import Cell, Grid, Measure
from pkm.run.metrics import FILE, read
from pkm.run.status import is_interrupted, read_report, read_status

State = Literal["finished", "running", "interrupted", "stopped", "failed", "not run"]


@dataclass(frozen=True)
class Result:
    """One run."""

    seed: int
    config: Config
    state: State
    reason: str
    """Why it stopped or failed; empty otherwise."""
    report: dict[str, Any] | None
    """Its report.json."""
    speed: dict[str, Any] | None
    """Words a second: speed.json, measured with nothing else at work. The report's own may have been taken beside other runs."""

    facts: dict[str, Any] | None
    """How it answered when asked for facts; None if it was not."""

    def value(self, measure: Measure) -> float | None:
        """None where it was not measured. Of several memories, usage and KL are means."""
        if measure == "kwords_per_s":
            return self.speed["words_per_second"] / 1000 if self.speed else None
        if self.report is None:
            return None
        if measure == "recall":
            return nats_saved(self.facts) if self.facts else None
        if measure == "train_perplexity":
            training = self.report.get("training")
            return training["perplexity"] if training else None
        if measure == "perplexity":
            return self.report["evaluation"]["perplexity"]
        memories = self.report["evaluation"]["memories"].values()
        key = {"usage": "percent", "kl": "kl"}[measure]
        return statistics.fmean(memory[key] for memory in memories) if memories else None

    def beyond(self, measure: Measure) -> bool:
        """Whether it is a perplexity beyond pkm.format.LARGEST_PERPLEXITY."""
        scored = {"perplexity": "evaluation", "train_perplexity": "training"}.get(measure)
        found = self.report.get(scored) if self.report and scored else None
        return found is not None and found["perplexity"] is None

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of its metrics.jsonl, in order; empty without one."""
        return list(read(self.config.directory / FILE))


@dataclass(frozen=True)
class CellResult:
    cell: Cell
    runs: tuple[Result, ...]
    """One a seed."""

    def beyond(self, measure: Measure) -> bool:
        """Whether that of any seed is: then the mean is, too."""
        return any(run.beyond(measure) for run in self.runs)

    def values(self, measure: Measure) -> list[float]:
        """Of every seed that has it; none if one is beyond all numbers."""
        if self.beyond(measure):
            return []
        return [value for run in self.runs if (value := run.value(measure)) is not None]

    def mean(self, measure: Measure) -> float | None:
        values = self.values(measure)
        return statistics.fmean(values) if values else None

    def spread(self, measure: Measure) -> float | None:
        """Standard deviation over seeds (n - 1); None of fewer than two."""
        values = self.values(measure)
        return statistics.stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class GridResult:
    grid: Grid
    seeds: tuple[int, ...]
    cells: tuple[CellResult, ...]


def read_results(grid: Grid, seeds: Sequence[int]) -> GridResult:
    """What is on disk now. A cell that is not trained has one run, of the first seed, and only its speed."""
    cells = []
    for cell in grid.cells:
        mine = seeds if cell.trained else seeds[:1]
        cells.append(CellResult(cell, tuple(read_result(cell.run(seed)[0]) for seed in mine)))
    return GridResult(grid, tuple(seeds), tuple(cells))


def read_result(config: Config) -> Result:
    """Of one run, by its config."""
    status = read_status(config.directory)
    report = read_report(config.directory)
    state: State = "interrupted" if is_interrupted(status) else status.get("state", "not run")
    reason = str(status.get("reason") or "") if state in ("stopped", "failed") else ""
    if state == "finished" and status.get("step", 0) < config.optim.steps:
        state, reason = "stopped", f"at step {status.get('step', 0)}"
    elif state == "finished" and report is None:
        state, reason = "stopped", "its report is gone: the same command writes it again"
    report = report if state == "finished" else None
    return Result(
        config.seed, config, state, reason, report, read_speed(config.directory), read_facts(config.directory)
    )
