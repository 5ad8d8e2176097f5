"""What a doctor's check finds, and how findings are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from rich.markup import escape
from rich.table import Table

Status = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Finding:
    about: str
    status: Status
    """note = works, or is not needed; fail = a run cannot do without."""
    found: str
    advice: str = ""


def guarded(about: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of `check`; whatever it raises is one more."""
    try:
        yield from check()
    except Exception as error:  # a doctor reports what breaks instead of breaking
        yield Finding(about, "fail", f"{type(error).__name__}: {error}", "see the message; reinstall what it names")


MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fail": "[bold red]FAIL[/]"}


def table(findings: list[Finding]) -> Table:
    """The findings for a terminal."""
    grid = Table(box=None, show_header=False, pad_edge=False)
    for style in ("", "bold", ""):
        grid.add_column(style=style, overflow="fold")
    for finding in findings:
        advice = f"[dim]; {escape(finding.advice)}[/]" if finding.advice else ""
        grid.add_row(MARKS[finding.status], finding.about, escape(finding.found) + advice)
    return grid


def as_json(findings: list[Finding]) -> list[dict[str, str]]:
    return [asdict(finding) for finding in findings]
