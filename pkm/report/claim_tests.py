"""What claims are made of: differences, trends and ratios of a grid's numbers, each with a verdict and the numbers in words.

Perplexities and speeds are compared as logarithms, so that differences are percentages; usage in percentage points, KL in nats.

- A difference is a contrast of the cells' means in the additive model y = cell + seed, by least squares, and its 95 %
  interval is Student's (Montgomery, Design and Analysis of Experiments: contrasts in randomized blocks); of two cells
  alone that is the paired t test over seeds. Few seeds do not know their spread: where the cells of a claim leave less
  than 3 degrees of freedom, the residuals of all cells of the grid are pooled. An interval that covers 0 is "undecided",
  and so is every difference of single runs. Where the claim picks one of several differences, the interval covers all of
  them at once (Bonferroni).
- A trend is the slope over the sizes, a contrast too, given 3 degrees of freedom; else Kendall's rank correlation of cells
  and sizes, with its exact two-sided p-value from all orders that each row of cells could have had (Kendall, Rank
  Correlation Methods). Cells are runs of their own, so that this decides with one seed, at p <= 0.05.
- Speeds are timed over many batches on one machine: they differ if their ratio is more than SPEED_TOLERANCE.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

from pkm.experiments.grid import Coordinate, Measure
from pkm.report.numbers import Numbers, Pair, Places, amount, amounts, place, reads, size, spoken
from pkm.report.results import CellResult
from pkm.report.statistics import ENOUGH, LEVEL, Fit, Weights, fit, judged, kendall

Verdict = Literal["holds", "does not hold", "undecided", "not run"]
Outcome = tuple[Verdict, str]
Test = Callable[[Numbers], Outcome]
Point = tuple[float, Weights]
"""A size, and the contrast that stands there."""

SPEED_TOLERANCE = 1.1
ALIKE: dict[Measure, float] = {"usage": 10.0, "perplexity": math.log(1.025)}
"""What the paper's "around 70 %" and "around 20.5" leave room for."""
OVERFIT = 1.1
"""Test over training perplexity; a smaller ratio may come from the two texts."""


def difference(
    n: Numbers,
    measure: Measure,
    sign: int,
    before: Places,
    after: Places,
    by: Sequence[Coordinate] = (),
    large: bool = False,
) -> Outcome:
    """Cells at `after` are higher (sign 1) or lower (-1) than those at `before` with the same `by`, on average."""
    pairs, missing = n.pairs(measure, before, after, by, large)
    if not pairs:
        return not_run(missing)
    weights: dict[str, float] = defaultdict(float)
    for a, b in pairs:
        weights[a.cell.name] -= 1 / len(pairs)
        weights[b.cell.name] += 1 / len(pairs)
    verdict, effect = judge(n, measure, sign, n.fit(measure, weights), weights)
    mean = "on average " if len(pairs) > 1 else ""
    return verdict, f"{spoken(measure)} {n.show_pairs(pairs, measure, by)}: {mean}{effect}{without(missing)}"


def judge(
    n: Numbers,
    measure: Measure,
    sign: int,
    fitted: Fit,
    weights: Weights,
    looks: int = 1,
    margin: float = 0.0,
    unit: str = "",
) -> Outcome:
    """A contrast is above (sign 1) or below (-1) the margin; in words, its size and how sure that is."""
    effect, half = fitted.contrast(weights), fitted.half_width(weights, looks)
    step = amount(effect, measure) + unit
    if n.printed:
        return "undecided", step
    if math.isinf(half):
        way = "in" if (effect - margin) * sign > 0 else "against"
        return "undecided", f"{step}, {way} the claim's direction; one seed: spread unknown"
    interval = amounts((effect - half, effect + half), measure, " to ")
    several = f" for {looks} differences at once" if looks > 1 else ""
    spread = f"spread {amount(fitted.spread, measure).lstrip('+')} over {fitted.seeds} in {len(fitted.means)} cells"
    verdict = judged(effect - half - margin, effect + half - margin, sign)
    return verdict, f"{step} (95 % interval{several} {interval}; {spread})"


def trend(
    n: Numbers,
    measure: Measure,
    sign: int,
    over: Coordinate,
    by: Sequence[Coordinate] = (),
    places: Places | None = None,
) -> Outcome:
    """Along `over`, within cells alike in `by`, the measure rises (sign 1) or falls (-1)."""
    cells = n.cells(measure, places or {})
    rows = n.rows(n.measured(cells, measure), over, by)
    missing = n.missing(cells, measure)
    if sum(len(row) - 1 for row in rows) < 2:
        return not_run(missing)
    points = [[(size(cell, over), {cell.cell.name: 1.0}) for cell in row] for row in rows]
    verdict, effect = slope(n, measure, sign, over, points)
    shown = "; ".join(n.show_row(row, measure, by or (over,)) for row in rows)
    return verdict, f"{spoken(measure)} {shown}: {effect}{without(missing)}"


def widening(n: Numbers, measure: Measure, sign: int, before: Places, after: Places) -> Outcome:
    """The difference from `before` to `after`, at equal slots, rises (sign 1) or falls (-1) as the slots grow."""
    pairs, missing = n.pairs(measure, before, after, ("slots",))
    if len(pairs) < 3:
        return not_run(missing)
    points = [(size(b, "slots"), {a.cell.name: -1.0, b.cell.name: 1.0}) for a, b in pairs]
    verdict, effect = slope(n, measure, sign, "slots", [points])
    fitted = n.fit(measure, [name for _, weights in points for name in weights])
    steps = amounts([fitted.contrast(weights) for _, weights in points], measure, ", ")
    ends = " to ".join(n.label(pairs[i][1], ("slots",)) for i in (0, -1))
    return verdict, f"{spoken(measure)} by {steps} ({ends}): {effect}{without(missing)}"


def slope(n: Numbers, measure: Measure, sign: int, over: Coordinate, rows: Sequence[Sequence[Point]]) -> Outcome:
    """Points rise (sign 1) or fall (-1) with their size: by the rows' common slope and its interval, or by rank."""
    fitted = n.fit(measure, [name for row in rows for _, weights in row for name in weights])
    tau, p, least = kendall([[(x, fitted.contrast(weights)) for x, weights in row] for row in rows])
    if fitted.freedom < ENOUGH and least <= LEVEL:
        verdict = judged(tau, tau, sign) if p <= LEVEL else "undecided"
        return verdict, ranked(tau, p) + ("; one seed" if fitted.freedom == 0 and not n.printed else "")
    centred = [[(x - sum(x for x, _ in row) / len(row), weights) for x, weights in row] for row in rows]
    squares = sum(x * x for row in centred for x, _ in row)
    total: dict[str, float] = defaultdict(float)
    for x, weights in itertools.chain(*centred):
        for name, weight in weights.items():
            total[name] += weight * x / squares
    unit = " per memory" if over == "memories" else f" per doubling of {over}"
    return judge(n, measure, sign, fitted, total, unit=unit)


def enough_slots(n: Numbers) -> Outcome:
    """The largest memory with BatchNorm against none, and how many sizes beat none by more than a hundredth."""
    memories = n.cells("perplexity", {"batchnorm": True})
    largest = max((cell.cell.original.slots for cell in memories), default=0)
    verdict, evidence = difference(n, "perplexity", -1, {"memories": 0}, {"slots": largest, "batchnorm": True})
    if verdict == "not run":
        return verdict, evidence
    dense = n.mean(n.cells("perplexity", {"memories": 0})[0], "perplexity")
    ready = n.measured(memories, "perplexity")
    better = sum(n.mean(cell, "perplexity") < 0.99 * dense for cell in ready)
    return verdict, f"{evidence}; {better} of {len(ready)} sizes beat the model without one by more than 1 %"


def above(n: Numbers, at: tuple[int, ...], rivals: tuple[int, ...], hardest: bool) -> Outcome:
    """Perplexity with the memory at any layer of `at` is above that at every rival (`hardest`), or at the best rival."""
    cells = n.cells("perplexity", {"position": (*at, *rivals)})
    ready = n.measured(cells, "perplexity")
    if len(ready) < len(at) + len(rivals):
        return not_run(n.missing(cells, "perplexity"))

    def perplexity(cell: CellResult) -> float:
        return n.mean(cell, "perplexity")

    mine = min((cell for cell in ready if place(cell, "position") in at), key=perplexity)
    others = [cell for cell in ready if place(cell, "position") in rivals]
    rival = (max if hardest else min)(others, key=perplexity)
    fitted = n.fit("perplexity", [cell.cell.name for cell in ready])
    weights = {mine.cell.name: 1.0, rival.cell.name: -1.0}
    verdict, effect = judge(n, "perplexity", 1, fitted, weights, len(at) * len(rivals))
    return verdict, f"perplexity {n.show_pairs([(rival, mine)], 'perplexity', ())}: {effect}"


def alike(n: Numbers, measure: Measure) -> Outcome:
    """Cells of equal H k differ by no more than the paper leaves room for."""
    cells = n.cells(measure, {})
    ready = n.measured(cells, measure)
    pairs = [(a, b) for a, b in itertools.permutations(ready, 2) if reads(a) == reads(b)]
    missing = n.missing(cells, measure)
    if not pairs:
        return not_run(missing)
    fitted = n.fit(measure, [cell.cell.name for cell in ready])

    def apart(pair: Pair) -> dict[str, float]:
        return {pair[0].cell.name: -1.0, pair[1].cell.name: 1.0}

    a, b = max(pairs, key=lambda pair: fitted.contrast(apart(pair)))
    weights = apart((a, b))
    verdict, effect = judge(n, measure, -1, fitted, weights, len(pairs) // 2, ALIKE[measure])
    return verdict, f"{measure} differs most in {n.show_pairs([(a, b)], measure, ())}: {effect}{without(missing)}"


def overfit(n: Numbers) -> Outcome:
    """Test perplexity is more than OVERFIT times the training perplexity of the same run."""
    (cell,) = n.result.cells
    test, training = n.of(cell, "perplexity"), n.of(cell, "train_perplexity")
    both = {seed: math.log(test[seed] / training[seed]) for seed in test.keys() & training.keys()}
    if not both:
        return not_run(n.missing([cell], "train_perplexity"))
    name = cell.cell.name
    verdict, effect = judge(n, "perplexity", 1, fit({name: both}), {name: 1.0}, margin=math.log(OVERFIT))
    means = f"{n.show(cell, 'train_perplexity')} in training, {n.show(cell, 'perplexity')} in test ({n.label(cell)})"
    return verdict, f"perplexity {means}: {effect}"


# Speed: what is asked is not whether two timings differ, but whether by enough to matter.


def steady(n: Numbers, places: Places, falls: bool) -> Outcome:
    """Speed is the same at every size, or (falls) it goes down as the memory grows."""
    cells = n.cells("kwords_per_s", places)
    missing = n.missing(cells, "kwords_per_s")
    ready = n.measured(cells, "kwords_per_s")
    if len(ready) < 3:
        return not_run(missing)
    (row,) = n.rows(ready, "slots", ())
    speeds = [n.mean(cell, "kwords_per_s") for cell in row]
    ratio = speeds[0] / speeds[-1] if falls else max(speeds) / min(speeds)
    tau, p, _ = kendall([[(size(cell, "slots"), speed) for cell, speed in zip(row, speeds, strict=True)]])
    depends = p <= LEVEL and ratio > SPEED_TOLERANCE and (tau < 0 or not falls)
    verdict: Verdict = "holds" if depends == falls else "does not hold"
    if not depends and ratio > SPEED_TOLERANCE:
        verdict = "undecided"
    what = "smallest over largest memory" if falls else "fastest over slowest"
    shown = n.show_row(row, "kwords_per_s", ("slots",))
    return verdict, f"thousand words/s {shown}: {what} {ratio:.3g}, {ranked(tau, p)}{without(missing)}"


def pulls_away(n: Numbers) -> Outcome:
    """Product keys are faster than flat keys at the largest size, slower at none, and their lead grows with the size."""
    pairs, missing = n.pairs("kwords_per_s", {"keys": "flat"}, {"keys": "product"}, ("slots",))
    if len(pairs) < 3:
        return not_run(missing)
    leads = [n.mean(b, "kwords_per_s") / n.mean(a, "kwords_per_s") for a, b in pairs]
    tau, p, _ = kendall([[(size(b, "slots"), lead) for (_, b), lead in zip(pairs, leads, strict=True)]])
    slower = min(leads) < 1 / SPEED_TOLERANCE
    verdict: Verdict = "holds" if tau > 0 and p <= LEVEL and not slower else "undecided"
    verdict = verdict if leads[-1] > SPEED_TOLERANCE else "does not hold"
    ends = " to ".join(n.label(pairs[i][1], ("slots",)) for i in (0, -1))
    shown = ", ".join(f"{lead:.3g}" for lead in leads)
    return verdict, f"product keys {shown} times as fast ({ends}): {ranked(tau, p)}{without(missing)}"


def speed_ratio(n: Numbers, before: Places, after: Places, by: Sequence[Coordinate], least: float) -> Outcome:
    """Each cell at `after` is at least so many times as fast as that at `before`; undecided where cells disagree."""
    pairs, missing = n.pairs("kwords_per_s", before, after, by)
    if not pairs:
        return not_run(missing)
    ratios = [n.mean(b, "kwords_per_s") / n.mean(a, "kwords_per_s") for a, b in pairs]
    passed = sum(ratio >= least for ratio in ratios)
    verdict: Verdict = "holds" if passed == len(pairs) else "undecided" if passed else "does not hold"
    shown = n.show_pairs(pairs, "kwords_per_s", by)
    times = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return verdict, f"thousand words/s {shown}: {times} times as fast{without(missing)}"


def ranked(tau: float, p: float) -> str:
    return f"Kendall's tau {tau:+.2f}, exact p = {p:.2g}"


def without(missing: str) -> str:
    return f" ({missing})" if missing else ""


def not_run(missing: str) -> Outcome:
    return "not run", missing or "this grid has no such cells"
