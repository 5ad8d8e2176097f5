"""What the cells of a grid gave, side by side with what the paper prints: looked up by place, and in words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pkm.config.schema import Config
from pkm.experiments.grid import Coordinate, Measure, coordinate
from pkm.report.results import CellResult, GridResult
from pkm.report.statistics import ENOUGH, Fit, fit

Places = Mapping[str, Any]
"""Coordinates that a cell must have, in the paper's sizes; a tuple allows several."""
Pair = tuple[CellResult, CellResult]
UNITS: dict[Measure, str] = {"usage": "points", "kl": "nats", "recall": "nats"}
"""Of what is compared as it is; the rest as logarithms."""


@dataclass(frozen=True)
class Numbers:
    """What the cells of a grid gave: in these runs, or as the paper prints it."""

    result: GridResult
    printed: bool = False

    def of(self, cell: CellResult, measure: Measure) -> dict[int, float]:
        """By seed; empty where there is none."""
        if not self.printed and cell.beyond(measure):
            return {}
        if not self.printed:
            return {run.seed: value for run in cell.runs if (value := run.value(measure)) is not None}
        value = getattr(cell.cell.printed, measure, None)
        return {} if value is None else {0: value}

    def mean(self, cell: CellResult, measure: Measure) -> float:
        values = self.of(cell, measure).values()
        return sum(values) / len(values)

    def cells(self, measure: Measure, places: Places) -> list[CellResult]:
        """The cells at `places` for which the measure is wanted."""
        trained = [cell for cell in self.result.cells if cell.cell.trained or measure == "kwords_per_s"]
        allowed = {key: value if isinstance(value, tuple) else (value,) for key, value in places.items()}
        return [cell for cell in trained if all(place(cell, key) in values for key, values in allowed.items())]

    def measured(self, cells: Iterable[CellResult], measure: Measure) -> list[CellResult]:
        return [cell for cell in cells if self.of(cell, measure)]

    def missing(self, cells: Iterable[CellResult], measure: Measure) -> str:
        """The cells that lack the measure, by state; nothing for the paper's numbers."""
        lacking: dict[str, list[str]] = {}
        for cell in cells:
            if not self.printed and not self.of(cell, measure):
                names = lacking.setdefault(_state(cell), [])
                names += [cell.cell.name] if cell.cell.name not in names else []
        return "; ".join(f"{state}: {', '.join(names)}" for state, names in lacking.items())

    def rows(self, cells: Iterable[CellResult], over: Coordinate, by: Sequence[Coordinate]) -> list[list[CellResult]]:
        """Cells alike in `by`, along `over`; rows of one are left out."""
        rows: dict[tuple[Any, ...], list[CellResult]] = {}
        for cell in sorted(cells, key=lambda cell: size(cell, over)):
            rows.setdefault(tuple(place(cell, key) for key in by), []).append(cell)
        return [row for row in rows.values() if len(row) > 1]

    def pairs(
        self, measure: Measure, before: Places, after: Places, by: Sequence[Coordinate], large: bool = False
    ) -> tuple[list[Pair], str]:
        """Cells at `before` with those at `after` that are alike in `by`, if both have the measure; and who is missing.

        large    only the upper half of the sizes
        """
        both = itertools.product(self.cells(measure, before), self.cells(measure, after))
        pairs = [(a, b) for a, b in both if all(place(a, key) == place(b, key) for key in by)]
        pairs.sort(key=lambda pair: pair[1].cell.original.slots)
        pairs = pairs[len(pairs) // 2 :] if large else pairs
        ready = [(a, b) for a, b in pairs if self.of(a, measure) and self.of(b, measure)]
        return ready, self.missing(itertools.chain(*pairs), measure)

    def fit(self, measure: Measure, names: Iterable[str]) -> Fit:
        """Of the cells named, if these alone know their spread; else of all that have the measure.

        In logarithms, but for what UNITS names.
        """
        found = {cell.cell.name: self.of(cell, measure) for cell in self.cells(measure, {})}
        scale = float if measure in UNITS else math.log
        values = {name: {seed: scale(y) for seed, y in of.items()} for name, of in found.items() if of}
        own = fit({name: values[name] for name in dict.fromkeys(names)})
        return own if own.freedom >= ENOUGH else fit(values)

    # In words.

    def label(self, cell: CellResult, keys: Sequence[Coordinate] = ()) -> str:
        """Where it stands, in the sizes that were run: on the axes `keys`, or on all of its table's."""
        config = cell.cell.original if self.printed else cell.cell.config
        axes = keys or (*self.result.grid.settings.rows, *self.result.grid.settings.columns)
        return ", ".join(word for key in axes if (word := _word(config, key)))

    def show(self, cell: CellResult, measure: Measure) -> str:
        mean = self.mean(cell, measure)
        if measure == "usage":
            return f"{mean:.1f} %"
        return f"{mean:#.{3 if measure == 'kwords_per_s' else 4}g}".rstrip(".")

    def show_pairs(self, pairs: Iterable[Pair], measure: Measure, by: Sequence[Coordinate]) -> str:
        if by:
            told = [f"{self.show(a, measure)} → {self.show(b, measure)} ({self.label(b, by)})" for a, b in pairs]
        else:
            told = [" → ".join(f"{self.show(cell, measure)} ({self.label(cell)})" for cell in pair) for pair in pairs]
        return "; ".join(told)

    def show_row(self, row: Sequence[CellResult], measure: Measure, keys: Sequence[Coordinate]) -> str:
        """Its values in order; of the paper's, the ends."""
        told = [row[0], row[-1]] if self.printed else row
        places = dict.fromkeys(self.label(cell, keys) for cell in (row[0], row[-1]))
        return f"{' → '.join(self.show(cell, measure) for cell in told)} ({' to '.join(places)})"


def place(cell: CellResult, key: str) -> int | str | bool | None:
    """Where a cell stands on an axis, in the paper's sizes."""
    return coordinate(cell.cell.original, key)


def size(cell: CellResult, key: Coordinate) -> float:
    """The same on the axis of a trend: in doublings, or a number of memories."""
    found = place(cell, key)
    assert isinstance(found, int)
    return float(found) if key == "memories" else math.log2(found)


def reads(cell: CellResult) -> int:
    """Slots that a token reads, H k, in the paper's sizes; of memories that differ, those of the first."""
    memories = cell.cell.original.memories
    return memories[0].heads * memories[0].knn if memories else 0


def spoken(measure: Measure) -> str:
    return "KL" if measure == "kl" else measure


def amount(difference: float, measure: Measure) -> str:
    """A difference of what `fit` fits: percent, or in the measure's own unit."""
    if measure in UNITS:
        places = 1 if measure == "usage" else 2
        return f"{round(difference, places) + 0.0:+.{places}f} {UNITS[measure]}"
    return f"{round(100 * math.expm1(difference), 1) + 0.0:+.1f} %"


def amounts(differences: Iterable[float], measure: Measure, between: str) -> str:
    """Several, with the unit once."""
    *others, last = [amount(difference, measure) for difference in differences]
    return between.join([*(other.rsplit(" ", 1)[0] for other in others), last])


def _state(cell: CellResult) -> str:
    states = dict.fromkeys(run.state for run in cell.runs)
    return "not measured" if list(states) == ["finished"] else ", ".join(states)


def _word(config: Config, key: Coordinate) -> str:
    found = coordinate(config, key)
    if found is None:
        return ""
    if key in ("slots", "memories") and found == 0:
        return "no memory"
    words = {
        "layers": f"{found} layers", "dim": f"dimension {found}", "position": f"layer {found}", "keys": f"{found} keys",
        "memories": "1 memory" if found == 1 else f"{found} memories", "slots": f"{math.isqrt(config.slots)}^2 slots",
        "batchnorm": "BatchNorm" if found else "no BatchNorm", "heads": f"H = {found}", "knn": f"k = {found}",
    }  # fmt: skip
    return words[key]
