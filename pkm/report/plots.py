"""Plots of a grid: what the paper's figures show, ours beside the paper's."""

from __future__ import annotations

from dataclasses import dataclass

from pkm.report.results import GridResult


@dataclass(frozen=True)
class Plot:
    """One figure, as SVG and as PNG."""

    name: str
    """Its file's, without ending."""
    caption: str
    """What it shows, in a sentence; also for those who cannot see it."""
    svg: str
    png: bytes


def plots(result: GridResult) -> tuple[list[Plot], list[str]]:
    """Those with something to show; and in words those without."""
    return [], ["Plots are not drawn yet."]
