"""Any runs side by side, going on or done: the settings in which they differ, what they measured, their curves overlaid."""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pkm.format import markdown_table, perplexity
from pkm.report.page import render
from pkm.report.plots import COLOURS, DASHES, Plot, add_legend, canvas, finished, ticks_in_plain_numbers
from pkm.report.recall import recall_markdown, recall_of
from pkm.report.run_directories import Run, differing

Over = Literal["step", "tokens", "time"]
AXES: dict[Over, str] = {
    "step": "steps",
    "tokens": "millions of tokens trained on",
    "time": "minutes of training, without evaluations and pauses",
}
NONE = "–"


@dataclass(frozen=True)
class Measured:
    """A column of the table: what was measured of a run, None where it was not."""

    name: str
    """In a CSV file's head."""
    heading: str
    digits: int
    """After the point."""
    of: Callable[[Run], float | None]
    log: Callable[[Run], float | None] | None = None
    """The logarithm of a perplexity, which is known even where the perplexity is too large for a number."""

    def shown(self, run: Run) -> str:
        value, log = self.of(run), self.log(run) if self.log else None
        if value is None and log is None:
            return NONE
        return perplexity(value, log, self.digits)


def _training_speed(run: Run) -> float | None:
    # Without the first record, which includes what happens once: compilation, filling of caches.
    found = [r["tokens_per_second"] for r in run.of_kind("train")[1:] if r.get("tokens_per_second")]
    return statistics.median(found) if found else None


def _peak_memory(run: Run) -> float | None:
    found = [r["peak_memory_bytes"] / 2**30 for r in run.of_kind("train") if r.get("peak_memory_bytes")]
    return max(found) if found else None


def _best(key: str) -> Callable[[Run], float | None]:
    return lambda run: run.best.get(key)


def _test(key: str) -> Callable[[Run], float | None]:
    return lambda run: run.evaluation.get(key)


MEASURED = (
    Measured("best_valid_perplexity", "best valid ppl", 2, _best("perplexity"), _best("loss")),
    Measured("best_step", "at step", 0, _best("step")),
    Measured("test_perplexity", "test ppl", 2, _test("perplexity"), _test("loss")),
    Measured("test_word_perplexity", "test ppl per word", 1, _test("word_perplexity"), _test("word_loss")),
    Measured("usage_percent", "usage %", 1, lambda run: run.of_memories("percent")),
    Measured("kl", "KL", 2, lambda run: run.of_memories("kl")),
    Measured("words_per_second", "words/s", 0, lambda run: (run.speed or {}).get("words_per_second")),
    Measured("training_tokens_per_second", "tokens/s in training", 0, _training_speed),
    Measured("peak_memory_gib", "peak GiB", 2, _peak_memory),
)


# The table.


def shared(runs: Sequence[Run]) -> dict[str, str]:
    """The settings that all runs have alike."""
    first, *others = (run.settings for run in runs)
    same = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    return {key: value for key, value in same.items() if key != "memory" or value == "none"}


def headings(runs: Sequence[Run]) -> list[str]:
    return ["run", "state", "step", *differing(runs), *(column.heading for column in MEASURED)]


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """A run each, under `headings`."""
    keys, found = differing(runs), []
    for run in runs:
        state = f"{run.state}: {run.reason}" if run.reason else run.state
        steps = run.settings.get("optim.steps", "")
        step = f"{run.step:,}" + (f" of {int(steps):,}" if steps.isdigit() else "")
        settings, measured = (run.settings.get(key, NONE) for key in keys), (column.shown(run) for column in MEASURED)
        found.append([run.label, state, step, *settings, *measured])
    return found


def csv_text(runs: Sequence[Run]) -> str:
    """The same table for programs: numbers are not rounded."""
    keys, text = differing(runs), io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    numbers = [(column.name, column.of) for column in MEASURED]
    numbers += [(f"{column.name}_log", column.log) for column in MEASURED if column.log]
    out.writerow(["run", "state", "reason", "step", *keys, *(name for name, _ in numbers)])
    for run in runs:
        settings, measured = (run.settings.get(key, "") for key in keys), (of(run) for _, of in numbers)
        out.writerow([run.label, run.state, run.reason, run.step, *settings, *measured])  # None is written as nothing
    return text.getvalue()


def remarks(runs: Sequence[Run]) -> list[str]:
    """What the reader of the numbers has to know."""
    said = []
    corpora = _grouped(runs, lambda run: run.corpus)
    if len(corpora) > 1:
        groups = "; ".join(f"{corpus[:12]}: {_few(labels)}" for corpus, labels in corpora.items())
        said.append(f"Perplexities cannot be compared: the runs learn from different corpora ({groups}).")
    for split, asked in (("valid", "evaluate.documents"), ("test", "evaluate.test_documents")):
        texts = _grouped(runs, lambda run, split=split: _scored(run, split))  # type: ignore[misc]
        if len(corpora) <= 1 and len(texts) > 1:
            groups = "; ".join(f"{tokens:,} tokens: {_few(labels)}" for tokens, labels in texts.items())
            why = f"they are of different texts, see {asked} ({groups})"
            said.append(f"The {split} perplexities cannot be compared: {why}.")
    if unfinished := [run.label for run in runs if run.report is None]:
        said.append(f"No report yet, so usage and KL are of the newest validation: {_few(unfinished)}.")
    return said


def _grouped(runs: Sequence[Run], by: Callable[[Run], Any]) -> dict[Any, list[str]]:
    """Labels of runs by something that they have; those without it are left out."""
    groups: dict[Any, list[str]] = {}
    for run in runs:
        if (value := by(run)) is not None:
            groups.setdefault(value, []).append(run.label)
    return groups


def _few(labels: Sequence[str]) -> str:
    return ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if labels[4:] else "")


def _scored(run: Run, split: str) -> int | None:
    return (run.evaluation if split == "test" else run.best).get("tokens")


def markdown(runs: Sequence[Run]) -> str:
    """For a terminal, and for a document."""
    body = [[cell.replace("|", "\\|") for cell in row] for row in rows(runs)]
    text = markdown_table(headings(runs), body) + "".join(f"\n{line}\n" for line in remarks(runs))
    return text + (f"\n{recall_markdown(known)}" if (known := recall_of(runs)) else "")


# Curves.


def plots(runs: Sequence[Run], over: Over) -> tuple[list[Plot], list[str]]:
    """Training loss, validation perplexity and usage of all runs; and in words why others are not drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        return [], ["Plots are not drawn, since matplotlib is not installed: pip install 'pkm[report]'."]
    drawn: list[Plot] = []
    lacking: list[str] = []
    for name, title, kind, value, logarithmic in (
        ("train-loss", "Training loss, in nats per token", "train", lambda r: r.get("loss"), False),
        ("valid-perplexity", "Validation perplexity", "valid", lambda r: r.get("perplexity"), True),
        ("usage", "Memory usage in validation, in percent of the slots", "valid", _usage, False),
    ):
        lines = {run.label: points(run, kind, over, value) for run in runs}
        if any(lines.values()):
            drawn.append(plot(name, title, lines, over, logarithmic))
        else:
            lacking.append(f"{title}: nothing to draw, no run has measured it yet.")
    return drawn, lacking


def plot(
    name: str, title: str, lines: Mapping[str, Sequence[tuple[float, float]]], over: Over, logarithmic: bool
) -> Plot:
    """Told apart by colour and, from the seventh on, by dashes; a run looks the same in every plot."""
    with canvas(height=3.6) as figure:
        axes = figure.subplots()
        for i, (label, line) in enumerate(lines.items()):
            style: Any = {"color": COLOURS[i % len(COLOURS)][0], "linestyle": DASHES[i // len(COLOURS) % len(DASHES)]}
            if line:
                marker = "o" if len(line) < 30 else ""
                axes.plot(*zip(*line, strict=True), label=label, marker=marker, markersize=3, **style)
        axes.set(xlabel=AXES[over], ylabel=_in_a_sentence(title.partition(",")[0]))
        if name == "usage":
            axes.set_ylim(0, 105)
        if logarithmic:
            axes.set_yscale("log")
            ticks_in_plain_numbers(axes)
        add_legend(figure)
        scale = ", on a logarithmic axis" if logarithmic else ""
        return finished(figure, f"compare-{name}", f"{title}{scale}, over the {AXES[over]}.")


def _in_a_sentence(title: str) -> str:
    """Without the capital that it begins with, unless that is a short form's."""
    return title if title[1:2].isupper() else title[:1].lower() + title[1:]


def _usage(record: Mapping[str, Any]) -> float | None:
    memories = record.get("memories") or {}
    return statistics.fmean(memory["percent"] for memory in memories.values()) if memories else None


def points(
    run: Run, kind: str, over: Over, value: Callable[[dict[str, Any]], float | None]
) -> list[tuple[float, float]]:
    """(place, value) of every record of a kind that has a finite value."""
    places = places_of(run, over)
    found = [(places.get(r["step"]), value(r)) for r in run.of_kind(kind)]
    return [(x, y) for x, y in found if x is not None and y is not None and math.isfinite(y)]


def places_of(run: Run, over: Over) -> dict[int, float]:
    """Where each step that has a record stands on the axis."""
    steps = sorted({record["step"] for record in run.records})
    if over == "step":
        return {step: float(step) for step in steps}
    batch = run.settings.get("optim.batch_tokens", "")
    if not batch.isdigit():
        return {}
    if over == "tokens":
        return {step: step * int(batch) / 1e6 for step in steps}
    rates = {r["step"]: r["tokens_per_second"] for r in run.of_kind("train") if r.get("tokens_per_second")}
    minutes, last, places = 0.0, 0, {}
    for step in steps:
        later = (rates[at] for at in sorted(rates) if at >= step)
        if rate := next(later, None) or next(reversed(rates.values()), 0):
            minutes += (step - last) * int(batch) / rate / 60
            last, places[step] = step, minutes
    return places


def html(runs: Sequence[Run], over: Over) -> str:
    """A page in one file that loads no other."""
    drawn, lacking = plots(runs, over)
    return render(
        "compare.html",
        headings=headings(runs),
        words=3 + len(differing(runs)),
        rows=rows(runs),
        remarks=remarks(runs),
        plots=drawn,
        lacking=lacking,
        recall=recall_of(runs),
        shared=shared(runs),
    )
