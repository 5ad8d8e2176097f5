"""The gradient of the rows that were read, added up on a GPU over backward passes, so that no pass waits for the one before.

How many rows there are only the GPU knows: which row is where in the buffer, and how many are, are tensors too.

Shapes: K rows of width D, U rows that were read so far.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RowSum:
    """Gradients of the rows of a table (K, D) that were read since `.clear()`, in the order in which they were first read.

    places    (K,) int32: where a row's gradient stands, -1 for rows that were not read
    state     (2,) int32: U before the pass that is being added, and after it
    rows      (at least U,) int64: the row of each place
    values    (at least U, D) fp32: its gradient
    squares   (at least U,) fp32: the sum of that gradient's squares, 0 beyond U
    """

    def __init__(self, table: Tensor):
        self.places = torch.full((len(table),), -1, dtype=torch.int32, device=table.device)
        self.state = torch.zeros(2, dtype=torch.int32, device=table.device)
        self.rows = torch.empty(0, dtype=torch.int64, device=table.device)
        self.values = torch.empty(0, table.shape[1], device=table.device)
        self.squares = torch.zeros(0, device=table.device)
        self.reads = 0

    def reserve(self, reads: int) -> None:
        """Room for the rows of so many more reads: at most K in all. It grows in a run's first step, and stays."""
        self.reads += reads
        slots, room = len(self.places), len(self.rows)
        if min(slots, self.reads) <= room:
            return
        more = min(slots, max(self.reads, 2 * room)) - room
        self.rows = torch.cat([self.rows, self.rows.new_empty(more)])
        self.squares = torch.cat([self.squares, self.squares.new_zeros(more)])
        values, self.values = self.values, self.values.new_empty(room + more, self.values.shape[1])
        self.values[:room] = values

    def clear(self) -> None:
        if self.reads:
            self.places.fill_(-1)
            self.state.zero_()
            self.squares.zero_()
        self.reads = 0

    def square(self) -> Tensor:
        """The sum of all squares, fp32 scalar."""
        return self.squares.sum()

    def sorted(self) -> tuple[Tensor, Tensor] | None:
        """Rows (U,) int64 ascending and their gradients (U, D), None if there are none; waits for the GPU."""
        used = int(self.state[1])
        if not used:
            return None
        rows, order = self.rows[:used].sort()
        return rows, self.values[:used][order]
