"""What facts runs know, side by side: means over the seeds of each setting, and how sure their differences are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pkm.format import markdown_table
from pkm.report.run_directories import Run, differing
from pkm.report.statistics import fit

NONE = "–"
OF_A_RUN = ("seed", "device", "threads", "max_minutes", "profile")
"""Settings in which runs of one model may differ, as they may in those below `log`, `checkpoint` and `evaluate`."""
MAIN = ("never", "once", "more often")
Measure = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class RecallTable:
    about: str
    headings: list[str]
    rows: list[list[str]]


def recall_of(runs: Sequence[Run]) -> RecallTable | None:
    """A column for each setting that was asked, and for all but the first its difference to the first; None if no run was asked.

    Differences are taken seed by seed: runs of a seed read the same text in the same order, so that they are asked for the same
    facts. Their intervals are Student's (pkm.report.statistics).
    """
    asked = [run for run in runs if run.facts]
    if not asked:
        return None
    keys = [key for key in differing(asked) if _of_a_model(key)]
    settings: dict[tuple[str, ...], list[Run]] = {}
    for run in asked:
        settings.setdefault(tuple(run.settings.get(key, NONE) for key in keys), []).append(run)
    names = [", ".join(f"{key} {value}" for key, value in zip(keys, at, strict=True)) or "all" for at in settings]
    of = dict(zip(names, settings.values(), strict=True))
    heads = ["read in training"]
    for name, its in of.items():
        heads.append(f"{name} ({len(its)} {'run' if len(its) == 1 else 'runs'})")
        heads += ["difference, 95 % interval"] if name != names[0] else []
    rows = [[text, *_cells(of, measure)] for text, measure in _measures(asked)]
    counts = sorted({run.facts["asked"] for run in asked if run.facts})
    count = f"{counts[0]:,}" + (f" to {counts[-1]:,}" if len(counts) > 1 else "")
    about = (
        f"{count} names, places and numbers, each asked as the rest of its sentence. A fact read once in training is like one of "
        "a held-out article that was never read, but for that one reading: the nats that it costs fewer are what the reading left. "
        "Means and standard deviations over runs; differences to the first column, seed by seed."
    )
    return RecallTable(about, heads, rows)


def recall_markdown(table: RecallTable) -> str:
    return f"## Recall of facts\n\n{table.about}\n\n" + markdown_table(table.headings, table.rows)


def _of_a_model(key: str) -> bool:
    return key not in OF_A_RUN and key.partition(".")[0] not in ("log", "checkpoint", "evaluate")


def _measures(runs: Sequence[Run]) -> list[tuple[str, Measure]]:
    """What all runs have: nats an answer, what reading saved (a token, for answers read more often are shorter), and exact answers."""
    every = [run.facts["groups"] for run in runs if run.facts]
    groups = [group for group in every[0] if all(group in others for others in every)]

    def mean(group: str, key: str) -> Measure:
        return lambda facts: facts["groups"][group][key]

    def saved(group: str) -> Measure:
        return lambda facts: facts["groups"]["never"]["nll_per_token"] - facts["groups"][group]["nll_per_token"]

    found = [(f"{label(group)}: nats an answer", mean(group, "nll")) for group in groups]
    if "never" in groups:
        found += [
            (f"{group}: nats a token fewer than never", saved(group))
            for group in ("once", "more often")
            if group in groups
        ]
    return found + [(f"{group}: exact %", mean(group, "exact")) for group in MAIN if group in groups]


def label(group: str) -> str:
    """Of facts read never, once, more often, so many times, or once and so many steps ago."""
    return f"once, {group}" if group.endswith("ago") else group


def _cells(of: Mapping[str, Sequence[Run]], measure: Measure) -> list[str]:
    values = {
        name: {_seed(run): measure(run.facts) for run in runs if run.facts} for name, runs in of.items()
    }  # of two runs of a seed the last counts
    first, *_ = values
    cells = []
    for name, by_seed in values.items():
        mean, several = statistics.fmean(by_seed.values()), len(by_seed) > 1
        cells.append(f"{mean:.2f}" + (f" ± {statistics.stdev(by_seed.values()):.2f}" if several else ""))
        if name != first:
            cells.append(_difference(values[first], by_seed))
    return cells


def _difference(before: Mapping[int, float], after: Mapping[int, float]) -> str:
    fitted = fit({"before": before, "after": after})
    weights = {"before": -1.0, "after": 1.0}
    effect, half = fitted.contrast(weights), fitted.half_width(weights)
    return f"{effect:+.2f}" + ("" if math.isinf(half) else f" ({effect - half:+.2f} to {effect + half:+.2f})")


def _seed(run: Run) -> int:
    return int(run.settings.get("seed", 0))
