"""A grid's table before it is Markdown, LaTeX or HTML: ours beside the paper's, and why a number is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pkm.experiments.grid import Cell, Coordinate, Measure, coordinate
from pkm.format import decimals, perplexity
from pkm.report.results import CellResult, GridResult, Result

AXES: dict[Coordinate, str] = {
    "layers": "layers", "dim": "dimension", "memories": "memories", "slots": "memory slots", "batchnorm": "BatchNorm",
    "position": "position", "keys": "keys", "heads": "heads", "knn": "k",
}  # fmt: skip
MEASURES: dict[Measure, str] = {
    "perplexity": "perplexity", "train_perplexity": "training perplexity", "usage": "usage %", "kl": "KL",
    "kwords_per_s": "1000 words/s", "recall": "recall (nats/token)",
}  # fmt: skip
DIGITS: dict[Measure, int] = {
    "perplexity": 2, "train_perplexity": 2, "usage": 1, "kl": 2, "kwords_per_s": 1, "recall": 3,
}  # fmt: skip
PHRASES: dict[Coordinate, str] = {
    "layers": "{} layers", "dim": "dimension {}", "memories": "{} memories", "slots": "{} slots", "knn": "k = {}",
    "batchnorm": "BatchNorm: {}", "position": "position {}", "keys": "{} keys", "heads": "{} heads",
}  # fmt: skip
NONE, NO_MEMORY = "–", "no memory"


@dataclass(frozen=True)
class Label:
    """A value on an axis: ours, and the paper's if the scale replaced it."""

    ours: str
    paper: str = ""

    def __str__(self) -> str:
        return f"{self.ours} (paper {self.paper})" if self.paper else self.ours


@dataclass(frozen=True)
class Entry:
    """One measure of one cell."""

    ours: str
    """The mean over seeds, or in a word why there is none."""
    spread: str = ""
    """Standard deviation over seeds; empty for fewer than two."""
    paper: str = NONE
    best: bool = False
    paper_best: bool = False
    note: int | None = None
    """Which of the layout's notes says more."""


@dataclass(frozen=True)
class Row:
    labels: tuple[Label, ...]
    """One for each of the layout's `axes`."""
    groups: tuple[tuple[Entry, ...] | None, ...]
    """For each of its groups one entry a measure; None where the grid has no such cell."""


@dataclass(frozen=True)
class Layout:
    """A grid's table."""

    axes: tuple[str, ...]
    groups: tuple[Label, ...]
    """Of columns; a single empty one, if the grid has no `columns`."""
    measures: tuple[str, ...]
    rows: tuple[Row, ...]
    legend: tuple[str, ...]
    """How to read an entry."""
    notes: tuple[tuple[int, str], ...]
    """What an entry has no room for: why there is no number, which cells are only timed, how speed was measured.
    With the number by which entries name it; 0 if none does."""


def layout(result: GridResult) -> Layout:
    """Rows and groups of columns as the grid asks, in its cells' order; a dense model stands in every group of columns that vary only a memory."""
    settings = result.grid.settings
    rows: dict[tuple[Any, ...], Cell] = {}
    groups: dict[tuple[Any, ...], Cell] = {}
    for one in result.cells:
        rows.setdefault(place(one.cell, settings.rows), one.cell)
        at = place(one.cell, settings.columns)
        if None not in at:
            groups.setdefault(at, one.cell)
    if not groups:
        groups = {(): result.cells[0].cell}
    said = notes(result)
    best = {id(one) for one in best_cells(result)}
    best_printed = {id(one) for one in best_cells(result, printed=True)}

    def found(row: tuple[Any, ...], group: tuple[Any, ...]) -> tuple[Entry, ...] | None:
        for one in result.cells:
            at = place(one.cell, settings.columns)
            fits = all(a in (None, b) for a, b in zip(at, group, strict=False))
            if fits and place(one.cell, settings.rows) == row:
                marks = (id(one) in best, id(one) in best_printed)
                return tuple(_entry(one, m, i == 0, marks, said) for i, m in enumerate(settings.measures))
        return None

    return Layout(
        axes=tuple(axis_name(key) for key in settings.rows),
        groups=tuple(_group(cell, settings.columns) for cell in groups.values()),
        measures=tuple(MEASURES[measure] for measure in settings.measures),
        rows=tuple(
            Row(tuple(label(cell, key) for key in settings.rows), tuple(found(row, group) for group in groups))
            for row, cell in rows.items()
        ),
        legend=tuple(_legend(result)),
        notes=(*enumerate(said, start=1), *((0, remark) for remark in _remarks(result))),
    )


def axis_name(key: Coordinate) -> str:
    """A coordinate in words; a setting by its dotted key."""
    return AXES.get(key, key)


def place(cell: Cell, keys: Sequence[Coordinate]) -> tuple[Any, ...]:
    """Where the paper's cell stands: two of its sizes stay apart, even if a scale gives both the same."""
    return tuple(coordinate(cell.original, key) for key in keys)


def label(cell: Cell, key: Coordinate) -> Label:
    ours, paper = (written(key, coordinate(config, key)) for config in (cell.config, cell.original))
    return Label(ours, paper if paper != ours else "")


def written(key: Coordinate, value: int | str | bool | None) -> str:
    """A coordinate as a table's heading shows it: slots as a square where they are one."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "slots" and isinstance(value, int):
        side = math.isqrt(value)
        return NO_MEMORY if not value else f"{side}²" if side**2 == value else f"{value:,}"
    return str(value)


def number(measure: Measure, value: float | None) -> str:
    return NONE if value is None else decimals(value, DIGITS[measure])


def notes(result: GridResult) -> dict[str, list[CellResult]]:
    """Why cells have no number or fewer seeds than asked, each with the cells it is said of."""
    said: dict[str, list[CellResult]] = {}
    for one in result.cells:
        if text := missing(one, result.grid.settings.measures):
            said.setdefault(text, []).append(one)
    everything = len(result.cells) > 1
    return {
        f"{text}: {'every cell' if everything and len(cells) == len(result.cells) else names(cells)}": cells
        for text, cells in said.items()
    }


def names(cells: Sequence[CellResult]) -> str:
    return ", ".join(one.cell.name for one in cells)


def missing(one: CellResult, measures: Sequence[Measure]) -> str:
    """What a cell lacks and why, in a few words; empty if it has all. Words a second it has to have of one seed at least."""
    lacking = [run for run in one.runs if run.state != "finished"] if one.cell.trained else []
    if not lacking and (beyond := [MEASURES[measure] for measure in MEASURES if one.beyond(measure)]):
        return f"{' and '.join(beyond)} {perplexity(None, None)}"
    if not lacking:
        untimed = "kwords_per_s" in measures and not one.values("kwords_per_s")
        unasked = "recall" in measures and one.cell.trained and not all(run.facts for run in one.runs)
        return "; ".join(["not timed yet"] * untimed + ["not asked for facts yet"] * unasked)
    texts: dict[str, list[int]] = {}
    for run in lacking:
        texts.setdefault(_why(run), []).append(run.seed)
    if len(texts) == 1 and len(lacking) == len(one.runs):
        return next(iter(texts))
    return "; ".join(f"seed {', '.join(map(str, seeds))} {text}" for text, seeds in texts.items())


def _why(run: Result) -> str:
    if run.state in ("running", "interrupted"):
        step = max((r.get("step", 0) for r in run.metrics), default=0)
        return f"{run.state}, step {step:,} of {run.config.optim.steps:,}"
    return f"{run.state} ({' '.join(run.reason.split())})" if run.reason else run.state


def best_cells(result: GridResult, printed: bool = False) -> list[CellResult]:
    """Those of the lowest perplexity, ours or the paper's: of each dimension if columns tell it apart, else of all."""
    columns = result.grid.settings.columns
    scopes: dict[Any, list[tuple[float, CellResult]]] = {}
    for one in result.cells:
        value = one.cell.printed.perplexity if printed else one.mean("perplexity")
        if value is not None:
            scope = place(one.cell, ("dim",)) if "dim" in columns else ()
            scopes.setdefault(scope, []).append((value, one))
    return [min(scope, key=lambda found: found[0])[1] for scope in scopes.values() if len(scope) > 1]


def _entry(
    one: CellResult, measure: Measure, first: bool, best: tuple[bool, bool], said: dict[str, list[CellResult]]
) -> Entry:
    mean, spread = one.mean(measure), one.spread(measure)
    note = next((i for i, cells in enumerate(said.values(), start=1) if one in cells), None) if first else None
    ours = number(measure, mean)
    if mean is None and note:
        ours = one.runs[0].state if one.cell.trained else "not timed"
    if one.beyond(measure):
        ours = perplexity(None, None)
    shown, paper = (
        "" if spread is None else number(measure, spread),
        number(measure, getattr(one.cell.printed, measure, None)),
    )
    bold, paper_bold = (mark and measure == "perplexity" for mark in best)
    return Entry(ours, shown, paper, bold, paper_bold, note)


def _group(cell: Cell, columns: Sequence[Coordinate]) -> Label:
    ours = phrases(cell, columns, short=True)
    theirs = [label(cell, key).paper for key in columns]
    return Label(ours, ", ".join(filter(None, theirs)))


def phrases(cell: Cell, keys: Sequence[Coordinate], short: bool = False) -> str:
    """Where a cell stands, in words: `16 layers, dimension 1024`; unless `short`, with the paper's sizes in brackets."""
    labels = {key: label(cell, key) for key in keys if coordinate(cell.config, key) is not None}
    texts = {key: one.ours if short else str(one) for key, one in labels.items()}
    return ", ".join(_phrase(key, text) if text != NO_MEMORY else text for key, text in texts.items())


def _remarks(result: GridResult) -> list[str]:
    remarks = []
    cells = [one.cell for one in result.cells]
    here = ", ".join(dict.fromkeys(str(cell.config.corpus.path) for cell in cells))
    there = ", ".join(dict.fromkeys(str(cell.original.corpus.path) for cell in cells))
    if here != there:
        remarks.append(f"on the corpus {here}, in place of {there}")
    timed = [one for one in result.cells if not one.cell.trained]
    if timed and "perplexity" in result.grid.settings.measures:
        remarks.append(f"timed but not trained, as in the paper: {names(timed)}")
    if "kwords_per_s" in result.grid.settings.measures and (how := speeds(result)):
        remarks.append(f"words/s at inference, measured on {'; '.join(how)}")
    asked = [run.facts["asked"] for one in result.cells for run in one.runs if run.facts]
    if "recall" in result.grid.settings.measures and asked:
        facts = " to ".join(f"{count:,}" for count in sorted({min(asked), max(asked)}))
        remarks.append(
            f"recall: of {facts} names, places and numbers asked as the rest of their sentences, the nats that a token costs fewer "
            "where training held the sentence more than once than where it never did"
        )
    return remarks


def speeds(result: GridResult) -> list[str]:
    """Each way in which words a second were measured: device, precision and batch."""
    found = [run.speed for one in result.cells for run in one.runs if run.speed]
    shape = "{device}, {precision}, {batch_windows} windows of {context} tokens"
    return list(dict.fromkeys(shape.format(**speed) for speed in found))


def prose(text: str) -> str:
    """512^2 with its exponent raised, as in print."""
    return text.replace("^2", "²")


def _legend(result: GridResult) -> list[str]:
    seeds = len(result.seeds)
    lines = ["ours, in brackets the paper's"]
    if "perplexity" in result.grid.settings.measures and len(result.cells) > 1:
        scope = " of each dimension" if "dim" in result.grid.settings.columns else ""
        lines = [f"{lines[0]}; the lowest perplexity{scope} is bold"]
    return [*lines, f"mean ± standard deviation over {seeds} seeds"] if seeds > 1 else lines


def _phrase(key: Coordinate, text: str) -> str:
    return PHRASES[key].format(text) if key in PHRASES else f"{key} = {text}"
