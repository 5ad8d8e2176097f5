"""Which of the paper's claims hold in a grid's runs: computed from the runs, their seeds and the spread between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pkm.report.results import GridResult

Verdict = Literal["holds", "does not hold", "undecided", "not run"]


@dataclass(frozen=True)
class Finding:
    """One claim of the paper, and what these runs say of it."""

    claim: str
    verdict: Verdict
    evidence: str
    """One sentence: the numbers, the sizes, the seeds, and what the paper's own numbers give."""


def findings(result: GridResult) -> list[Finding]:
    """Of every claim that the paper makes with this grid, in the paper's order; empty for a grid it makes none with."""
    return []
