"""How far a step moves each group of parameters: the size of its update over the size of its weights.

Root mean squares, so that groups of any number of parameters compare. A group that learns well moves by about one in a
thousand a step; one that hardly moves, or moves by a tenth, has the wrong learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pkm.distributed import dist

SAMPLED_ROWS = 16_384
"""Of a table of values at most: it may be too large to be held twice."""


class UpdateSizes:
    """Keeps copies of the weights before a step, and compares them with what they are after it.

    dense     the parameters of each group that is updated as a whole
    tables    (K, d) values; only rows that moved count, of a sample of them at even distances
    sharded   the tables hold this rank's columns only
    """

    def __init__(self, dense: Mapping[str, Sequence[Tensor]], tables: list[Tensor], sharded: bool):
        self.dense, self.sharded = dense, sharded
        self.rows = [table.detach()[:: math.ceil(len(table) / SAMPLED_ROWS)] for table in tables]
        self.dense_before = {name: [p.detach().clone() for p in parameters] for name, parameters in dense.items()}
        self.rows_before = [rows.clone() for rows in self.rows]

    def result(self) -> dict[str, float]:
        """rms of the update / rms of the weights before it, by group; `values` where there are tables and rows that moved."""
        squares = {}
        for name, now in self.dense.items():
            both = zip(now, self.dense_before[name], strict=True)
            if now:
                squares[name] = torch.stack([_squares(p.detach(), before) for p, before in both])
        if self.rows:
            values = torch.stack([_moved(now, before) for now, before in zip(self.rows, self.rows_before, strict=True)])
            squares["values"] = dist.all_reduce(values) if self.sharded else values
        sizes = {}
        for name, each in squares.items():
            update, weights = each.sum(0).tolist()
            if weights > 0:
                sizes[name] = math.sqrt(update / weights)
        return sizes


def _squares(now: Tensor, before: Tensor) -> Tensor:
    """-> (2,): sums of the squares of the update, and of the weights before it."""
    return torch.stack([(now.float() - before.float()).square().sum(), before.float().square().sum()])


def _moved(now: Tensor, before: Tensor) -> Tensor:
    """As `_squares`, of the rows that moved."""
    moved = (now != before).any(1)
    return _squares(now[moved], before[moved])
