"""The page of one run, going on or done: its numbers, its curves, what its memories did over time, what it wrote, its settings."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any

from pkm.format import perplexity
from pkm.report.compare import NONE, Over, places_of, plot
from pkm.report.page import render
from pkm.report.plots import Plot
from pkm.report.recall import label
from pkm.report.run_directories import Run

Lines = dict[str, list[tuple[float, float]]]
Values = Callable[[Mapping[str, Any]], Mapping[str, float | None]]
SAMPLES = 12
"""Samples that are shown at most, evenly over the run."""


def html(run: Run, over: Over) -> str:
    """A page in one file that loads no other."""
    drawn, lacking = plots(run, over)
    return render(
        "single.html",
        run=run,
        numbers=numbers(run),
        memories=memories(run),
        recall=recall(run.facts) if run.facts else [],
        plots=drawn,
        lacking=lacking,
        samples=samples(run),
        machine=(run.report or {}).get("machine"),
    )


def numbers(run: Run) -> list[tuple[str, str]]:
    """What was measured: on test once there is a report, in validation before; what there is none of is left out."""
    test, best, last = run.evaluation, run.best, (run.of_kind("train") or [{}])[-1]
    found: list[tuple[str, str | None]] = []
    if test:
        found += [
            ("test perplexity per BPE token", perplexity(test["perplexity"], test.get("loss"))),
            ("test perplexity per word", perplexity(test["word_perplexity"], test.get("word_loss"))),
            ("bits per byte", _shown(test.get("bits_per_byte"), 4)),
        ]
    if best:
        found.append(
            (f"best validation perplexity (step {best['step']:,})", perplexity(best["perplexity"], best["loss"]))
        )
    if parameters := (run.report or {}).get("parameters"):
        found.append(("parameters", f"{parameters['dense']:,} dense, {parameters['values']:,} values"))
    speed = run.speed or {}
    found += [
        ("training loss at last", _shown(last.get("loss"), 4)),
        ("tokens trained on", _shown(last.get("tokens"), 0)),
        ("epochs", _shown(last.get("epochs"), 2)),
        ("tokens/s in training", _shown(last.get("tokens_per_second"), 0)),
        ("steps skipped", _shown(last.get("skipped"), 0)),
        ("words/s at inference", _shown(speed.get("words_per_second"), 0)),
    ]
    return [(name, text) for name, text in found if text is not None]


def _shown(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:,.{digits}f}"


def memories(run: Run) -> list[list[str]]:
    """Of each memory: layer, usage, KL, Gini, and slots never read in training; on test, before the report in validation."""
    newest = (run.of_kind("valid") or [{}])[-1].get("memories") or {}
    measured = run.evaluation.get("memories") or newest
    return [
        [
            layer,
            *(_shown(m.get(key), digits) or NONE for key, digits in (("percent", 2), ("kl", 4), ("gini", 3))),
            _shown(newest.get(layer, {}).get("never_read"), 2) or NONE,
        ]
        for layer, m in measured.items()
    ]


def recall(facts: Mapping[str, Any]) -> list[list[str]]:
    """Of each group of facts: how many, nats an answer with their standard error, nats a token, and exact answers."""
    rows = []
    for name, of in facts["groups"].items():
        error = "" if of.get("nll_error") is None else f" ± {of['nll_error']:.2f}"
        numbers = (f"{of['nll']:.2f}{error}", f"{of['nll_per_token']:.3f}", f"{of['exact']:.1f}")
        rows.append([label(name), f"{of['facts']:,}", *numbers])
    return rows


def samples(run: Run) -> list[tuple[int, str, str]]:
    """(step, prompt, what the model wrote), the first and the last among them."""
    found = [(r["step"], r["sample"]["prompt"], r["sample"]["text"]) for r in run.of_kind("valid") if "sample" in r]
    if len(found) <= SAMPLES:
        return found
    return [found[round(i * (len(found) - 1) / (SAMPLES - 1))] for i in range(SAMPLES)]


def plots(run: Run, over: Over) -> tuple[list[Plot], list[str]]:
    """Everything that was logged over time; in words why something is not drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        return [], ["Plots are not drawn, since matplotlib is not installed: pip install 'pkm[report]'."]
    train, valid = run.of_kind("train"), run.of_kind("valid")
    places = places_of(run, over)

    def lines(records: list[dict[str, Any]], values: Values, suffix: str = "") -> Lines:
        found: Lines = {}
        for record in records:
            for name, value in values(record).items():
                if value is not None and math.isfinite(value) and record["step"] in places:
                    found.setdefault(name + suffix, []).append((places[record["step"]], value))
        return found

    usage = lines(train, _memory("usage"), " in one batch") | lines(valid, _memory("percent"), " in validation")
    tries: list[tuple[str, str, Lines, bool]] = [
        (
            "loss",
            "Loss, in nats per token",
            lines(train, _of("loss", "training")) | lines(valid, _of("loss", "validation")),
            False,
        ),
        ("perplexity", "Validation perplexity", lines(valid, _of("perplexity", "validation")), True),
        ("usage", "Memory usage, in percent of the slots", usage, False),
        (
            "never-read",
            "Slots never read in training, in percent",
            _unless_0(lines(valid, _memory("never_read"))),
            False,
        ),
        ("kl", "KL from uniform of the slots' weights, in validation, in nats", lines(valid, _memory("kl")), False),
        ("share", "The memory's output over its residual stream", lines(train, _memory("output_share")), False),
        ("experts", "Usage of experts, in percent", lines(train, _memory("usage", "experts")), False),
        ("rates", "Learning rates", lines(train, lambda r: r.get("lr") or {}), True),
        ("norms", "Gradient norms", lines(train, lambda r: r.get("gradient_norm") or {}), True),
        (
            "moved",
            "Size of the updates over that of the weights",
            lines(train, lambda r: r.get("update_size") or {}),
            True,
        ),
        ("speed", "Tokens per second in training", lines(train[1:], _of("tokens_per_second", "training")), False),
    ]
    drawn = [plot(name, title, found, over, log) for name, title, found, log in tries if found]
    return drawn, [] if drawn else ["Nothing to draw: the run has logged nothing yet."]


def _unless_0(lines: Lines) -> Lines:
    return lines if any(y for line in lines.values() for _, y in line) else {}


def _of(key: str, name: str) -> Values:
    return lambda record: {name: record.get(key)}


def _memory(key: str, part: str = "memories") -> Values:
    return lambda record: {f"layer {layer}": of.get(key) for layer, of in (record.get(part) or {}).items()}
