"""Tables as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns line up when read as plain text."""
    body = [list(row) for row in rows]
    widths = [max(3, *(len(row[i]) for row in [list(header), *body])) for i in range(len(header))]
    lines = [_line(header, widths), "|" + "|".join("-" * (width + 2) for width in widths) + "|"]
    return "\n".join(lines + [_line(row, widths) for row in body]) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def comparison(runs: Sequence[tuple[str, str, str, dict[str, Any] | None]]) -> str:
    """(name, state, reason, report.json or None) of several runs as one table; of several memories, the first to last."""
    header = ["run", "state", "values", "perplexity", "per word", "usage %", "KL", "words/s"]
    return markdown_table(header, [_compared(*run) for run in runs])


def _compared(name: str, state: str, reason: str, report: dict[str, Any] | None) -> list[str]:
    if report is None:
        return [name, f"{state}: {reason}" if reason else state, "", "", "", "", "", ""]
    measured = report["evaluation"]
    memories = measured["memories"].values()
    return [
        name,
        state,
        f"{report['parameters']['values']:,}",
        f"{measured['perplexity']:.2f}",
        f"{measured['word_perplexity']:.2f}",
        ", ".join(f"{m['percent']:.1f}" for m in memories),
        ", ".join(f"{m['kl']:.2f}" for m in memories),
        f"{report['speed']['words_per_second']:,.0f}",
    ]
