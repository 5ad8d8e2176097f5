"""Which of the paper's claims hold in a grid's runs (sections 4.4 and 4.5): computed, with the paper's own numbers beside.

Every claim is judged by itself, at 5 %; pkm.report.claim_tests says how.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from pkm.report.claim_tests import (
    SPEED_TOLERANCE,
    Test,
    Verdict,
    above,
    alike,
    difference,
    enough_slots,
    overfit,
    pulls_away,
    speed_ratio,
    steady,
    trend,
    widening,
)
from pkm.report.numbers import Numbers
from pkm.report.results import GridResult


@dataclass(frozen=True)
class Finding:
    """One claim of the paper, and what these runs say of it."""

    claim: str
    verdict: Verdict
    evidence: str
    """The numbers, the sizes, the seeds; then what the paper's own numbers give."""


def findings(result: GridResult) -> list[Finding]:
    """Of every claim that the paper makes with this grid, in the paper's order; empty for a grid it makes none with."""
    found = []
    for claim, test in CLAIMS.get(result.grid.name, ()):
        verdict, evidence = test(Numbers(result))
        in_paper, paper = test(Numbers(result, printed=True))
        paper = "no numbers printed" if in_paper == "not run" else paper
        found.append(Finding(claim, verdict, f"{evidence}. Paper: {paper}."))
    return found


ONE_MEMORY: dict[str, Any] = {"before": {"memories": 0}, "after": {"memories": 1}, "by": ("layers", "dim")}
SHALLOW: dict[str, Any] = {
    "before": {"layers": 24, "memories": 0},
    "after": {"layers": 12, "memories": 1},
    "by": ("dim",),
}
NORM: dict[str, Any] = {"before": {"batchnorm": False}, "after": {"batchnorm": True}}
KEYS: dict[str, Any] = {"before": {"keys": "flat"}, "after": {"keys": "product"}, "by": ("slots",)}

BEATS_DEEPER: tuple[str, Test] = (
    "half the layers with a memory beat all without one, at the same dimension (12 and 24 in the paper)",
    partial(difference, measure="perplexity", sign=-1, **SHALLOW),
)
SPEED_OF_KEYS: list[tuple[str, Test]] = [
    (
        "with product keys, speed does not depend on the memory's size (within 10 %)",
        partial(steady, places={"keys": "product"}, falls=False),
    ),
    ("with flat keys, speed falls as the memory grows", partial(steady, places={"keys": "flat"}, falls=True)),
    ("product keys are faster than flat keys, the more so the larger the memory", pulls_away),
]
CLAIMS: dict[str, list[tuple[str, Test]]] = {
    "table1": [
        (
            "more layers lower perplexity",
            partial(trend, measure="perplexity", sign=-1, over="layers", by=("dim", "memories")),
        ),
        (
            "a larger dimension lowers perplexity",
            partial(trend, measure="perplexity", sign=-1, over="dim", by=("layers", "memories")),
        ),
        ("a memory lowers perplexity", partial(difference, measure="perplexity", sign=-1, **ONE_MEMORY)),
        BEATS_DEEPER,
        (
            "a second and a third memory lower perplexity further",
            partial(
                trend,
                measure="perplexity",
                sign=-1,
                over="memories",
                by=("layers", "dim"),
                places={"memories": (1, 2, 3)},
            ),
        ),
    ],
    "speed_perplexity": [
        BEATS_DEEPER,
        (
            "half the layers with a memory are faster than all without one (in the paper almost twice as fast)",
            partial(speed_ratio, least=SPEED_TOLERANCE, **SHALLOW),
        ),
        (
            "a memory barely slows the model (by less than 10 %)",
            partial(speed_ratio, least=1 / SPEED_TOLERANCE, **ONE_MEMORY),
        ),
    ],
    "table2": [
        (
            "more slots lower perplexity, with BatchNorm on the query",
            partial(trend, measure="perplexity", sign=-1, over="slots", places={"batchnorm": True}),
        ),
        (
            "more slots lower perplexity, without BatchNorm",
            partial(trend, measure="perplexity", sign=-1, over="slots", places={"batchnorm": False}),
        ),
        ("a memory of enough slots beats the same model without one at equal steps", enough_slots),
        (
            "BatchNorm raises the usage of large memories",
            partial(difference, measure="usage", sign=1, **NORM, by=("slots",), large=True),
        ),
        ("BatchNorm raises usage the more, the larger the memory", partial(widening, measure="usage", sign=1, **NORM)),
        (
            "BatchNorm lowers the perplexity of large memories",
            partial(difference, measure="perplexity", sign=-1, **NORM, by=("slots",), large=True),
        ),
        (
            "BatchNorm lowers perplexity the more, the larger the memory",
            partial(widening, measure="perplexity", sign=-1, **NORM),
        ),
    ],
    "table3": [
        (
            "a middle position (in the paper layers 4 and 5) beats the first",
            partial(difference, measure="perplexity", sign=-1, before={"position": 1}, after={"position": (4, 5)}),
        ),
        ("the first position is the worst", partial(above, at=(1,), rivals=(2, 3, 4, 5, 6), hardest=True)),
        (
            "the best position is between the first and the last",
            partial(above, at=(1, 6), rivals=(2, 3, 4, 5), hardest=False),
        ),
    ],
    "table4": [
        (
            "product keys have a higher usage than flat keys at equal slots",
            partial(difference, measure="usage", sign=1, **KEYS),
        ),
        (
            "product keys have a lower perplexity than flat keys at equal slots",
            partial(difference, measure="perplexity", sign=-1, **KEYS),
        ),
        (
            "product keys are used more evenly (a lower KL) than flat keys at equal slots",
            partial(difference, measure="kl", sign=-1, **KEYS),
        ),
        *SPEED_OF_KEYS,
    ],
    "speed_memory": SPEED_OF_KEYS,
    "heads_knn": [
        ("equal H k gives a similar usage (within 10 points)", partial(alike, measure="usage")),
        ("equal H k gives a similar perplexity (within 2.5 %)", partial(alike, measure="perplexity")),
        ("more heads raise usage", partial(trend, measure="usage", sign=1, over="heads", by=("knn",))),
        ("more heads lower perplexity", partial(trend, measure="perplexity", sign=-1, over="heads", by=("knn",))),
        ("more selected keys raise usage", partial(trend, measure="usage", sign=1, over="knn", by=("heads",))),
        (
            "more selected keys lower perplexity",
            partial(trend, measure="perplexity", sign=-1, over="knn", by=("heads",)),
        ),
    ],
    "one_billion_word": [
        ("training perplexity is well below test perplexity (by more than 10 %): the model overfits", overfit),
    ],
}
