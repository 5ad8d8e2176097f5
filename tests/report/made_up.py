"""Runs of a grid that nobody ran: their directories on disk, as training leaves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pkm.experiments.grid import Cell, Grid, load_grid

SPEED = {"tokens_per_second": 1.0, "device": "cpu, 1 threads", "precision": "bf16", "batch_windows": 16, "context": 128}
NASTY = r"""<script>alert("1")</script> & a|b `c` *d* 50% of $x_i^n$ {e} ~ \ #"""
"""What every format has to escape somewhere."""


def grid(name: str, runs: Path, scale: str = "paper") -> Grid:
    """With its runs below `runs`."""
    return load_grid(name, scale, [f"runs={json.dumps(str(runs))}"])


def cell(grid: Grid, name: str) -> Cell:
    return next(cell for cell in grid.cells if cell.name == name)


def write_run(
    cell: Cell,
    seed: int = 1,
    perplexity: float | None = 20.0,
    usage: float = 90.0,
    kl: float = 0.5,
    kwords_per_s: float = 10.0,
    state: str = "finished",
    reason: str = "all steps done, report written",
    step: int | None = None,
    recall: float | None = None,
) -> Path:
    """A run with its status, metrics and, if it is finished, its report; with `recall`, its facts. Validated at half its steps and at the end."""
    config, _ = cell.run(seed)
    step = config.optim.steps if step is None else step
    directory = config.directory
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "status.json", {"state": state, "step": step, "reason": reason})
    valid = [
        {"kind": "valid", "step": at, "perplexity": perplexity and perplexity * factor}
        for at, factor in ((step // 2, 2), (step, 1))
    ]
    train = {"kind": "train", "step": step, "loss": 3.0}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (*valid, train)))
    if state == "finished":
        memories = {str(layer): {"percent": usage, "kl": kl} for layer in config.memory_layers}
        report = {
            "evaluation": {"perplexity": perplexity, "memories": memories},
            "training": None,
            "speed": SPEED | {"words_per_second": 1000 * kwords_per_s},
            "machine": "A machine, Python 3, torch 2",
        }
        _write(directory / "report.json", report)
        _write(directory / "speed.json", report["speed"])
    if recall is not None:
        groups = {"never": {"nll_per_token": 7.0}, "more often": {"nll_per_token": 7.0 - recall}}
        _write(directory / "facts.json", {"step": step, "asked": 2900 + seed, "groups": groups})
    return directory


def write_speed(cell: Cell, kwords_per_s: float, seed: int = 1) -> None:
    """Of a cell that is only timed."""
    directory = cell.run(seed)[0].directory
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "speed.json", SPEED | {"words_per_second": 1000 * kwords_per_s})


def write_all(grid: Grid, seeds: tuple[int, ...] = (1,)) -> None:
    """Every cell finished, with the paper's numbers, a little worse for each next seed."""
    for cell in grid.cells:
        for seed in seeds if cell.trained else seeds[:1]:
            worse = 1 + 0.02 * (seed - 1)
            printed = cell.printed
            found = {"perplexity": (printed.perplexity or 20.0) * worse, "usage": (printed.usage or 50.0) / worse}
            speed = printed.kwords_per_s or 10.0 + len(cell.original.memory_layers)
            if cell.trained:
                write_run(cell, seed, kl=(printed.kl or 1.0) * worse, kwords_per_s=speed, **found)
            else:
                write_speed(cell, speed, seed)


def _write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record))
