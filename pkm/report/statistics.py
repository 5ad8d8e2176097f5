"""How sure a difference between runs is: contrasts of cells' means with Student's intervals, trends by exact rank tests."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

LEVEL = 0.05
ENOUGH = 3
"""Degrees of freedom from which on a spread says something: the 95 % interval is then 3.2 standard errors to each side."""
Weights = Mapping[str, float]
"""A contrast: of cells, by name."""


@dataclass(frozen=True)
class Fit:
    """Means of cells and how sure they are."""

    means: dict[str, float]
    """For contrasts: where seeds have effects of their own, all lack the same constant."""
    covariance: np.ndarray
    """Of the means, of noise with a spread of 1; (cells, cells), in the order of `means`."""
    spread: float
    """Standard deviation of a run around its cell's mean, seeds' own effects taken out; 0 where it is not known."""
    freedom: int
    """Degrees of freedom that the spread was estimated with; 0 = one seed, spread unknown."""
    seeds: str
    """How many a cell has, in words."""

    def contrast(self, weights: Weights) -> float:
        return sum(weight * self.means[name] for name, weight in weights.items())

    def half_width(self, weights: Weights, looks: int = 1) -> float:
        """Half of the 95 % interval around a contrast, one of `looks` that hold together; infinite for one seed."""
        if self.freedom == 0:
            return math.inf
        c = np.array([weights.get(name, 0.0) for name in self.means])
        return student(self.freedom, LEVEL / looks) * self.spread * math.sqrt(float(c @ self.covariance @ c))


def fit(values: Mapping[str, Mapping[int, float]]) -> Fit:
    """Least squares of y = cell + seed to {cell: {seed: y}}; without the seeds' effects where these cannot be told apart."""
    runs = [(name, seed, y) for name, of in values.items() for seed, y in of.items()]
    cells = list(values)
    seeds = sorted({seed for _, seed, _ in runs})
    effects = [[name == c for c in cells] + [seed == s for s in seeds[1:]] for name, seed, _ in runs]
    design = np.array(effects, dtype=float)
    if len(runs) <= design.shape[1] or np.linalg.matrix_rank(design) < design.shape[1]:
        design = design[:, : len(cells)]
    y = np.array([y for *_, y in runs])
    inverse = np.linalg.inv(design.T @ design)
    estimate = inverse @ design.T @ y
    freedom = len(runs) - design.shape[1]
    spread = math.sqrt(float(((y - design @ estimate) ** 2).sum()) / freedom) if freedom else 0.0
    n = len(cells)
    few, many = min(map(len, values.values())), max(map(len, values.values()))
    of = "one seed" if many == 1 else f"{many} seeds" if few == many else f"{few} to {many} seeds"
    return Fit(dict(zip(cells, estimate.tolist(), strict=False)), inverse[:n, :n], spread, freedom, of)


def student(freedom: int, tails: float) -> float:
    """The t that |T| exceeds with probability `tails`; the distribution as in Abramowitz and Stegun 26.7.3 and 26.7.4."""

    def within(t: float) -> float:
        angle = math.atan2(t, math.sqrt(freedom))
        term, total = (math.cos(angle), 0.0) if freedom % 2 else (1.0, 0.0)
        for i in range(1 + freedom % 2, freedom, 2):
            total += term
            term *= math.cos(angle) ** 2 * i / (i + 1)
        total *= math.sin(angle)
        return (angle + total) * 2 / math.pi if freedom % 2 else total

    low, high = 0.0, 1.0
    while within(high) < 1 - tails:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < 1 - tails else (low, middle)
    return high


def kendall(rows: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float, float]:
    """Kendall's tau over rows of (x, y), pairs being compared within a row: tau, its exact two-sided p, the least p there is.

    Under the null hypothesis every order of the y of a row is as likely as any other, in each row by itself.
    """

    def score(xs: Sequence[float], ys: Sequence[float]) -> int:
        both = itertools.combinations(zip(xs, ys, strict=True), 2)
        products = [(b[0] - a[0]) * (b[1] - a[1]) for a, b in both]
        return sum((product > 0) - (product < 0) for product in products)

    observed, most, null = 0, 0, Counter({0: 1})
    for row in rows:
        # Rounded, so that equal values are still equal after least squares.
        xs, ys = [x for x, _ in row], [round(y, 9) for _, y in row]
        observed += score(xs, ys)
        most += score(xs, xs)
        orders = Counter(score(xs, order) for order in itertools.permutations(ys))
        sums: Counter[int] = Counter()
        for (a, many), (b, more) in itertools.product(null.items(), orders.items()):
            sums[a + b] += many * more
        null = sums
    total = sum(null.values())
    p = sum(count for value, count in null.items() if abs(value) >= abs(observed)) / total
    largest = max(map(abs, null))
    return observed / most, p, sum(count for value, count in null.items() if abs(value) == largest) / total


def judged(low: float, high: float, sign: int) -> Literal["holds", "does not hold", "undecided"]:
    """Of the claim that what lies between low and high is above (sign 1) or below (-1) 0."""
    low, high = sorted((low * sign, high * sign))
    return "holds" if low > 0 else "does not hold" if high < 0 else "undecided"
