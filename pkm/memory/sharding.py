"""Values on several ranks: replicated, or sharded by columns (Memory Layers at Scale, 2024).

sharded     Each rank holds every slot, d / R columns of it. Indices and weights are gathered, each rank reads its columns for
            every rank's tokens, and the partial reads are exchanged; backward sends the weights' partial gradients home. The
            table, its gradient and its optimizer state never cross the network.
replicated  Each rank holds the whole table; the gradients of the rows that any rank read are summed.

Shapes: R ranks, N tokens of each rank, J reads of a token, K slots, d model width, U rows that any rank read.
"""

from __future__ import annotations

import torch
import torch.distributed as td
from torch import Tensor, nn

from pkm.distributed import dist
from pkm.distributed.collectives import exchange, gather, gather_differentiably
from pkm.memory.values import RowGradient, Values


def columns(width: int) -> slice:
    """This rank's columns of a table of `width`, which the number of ranks divides."""
    assert width % dist.world_size() == 0
    part = width // dist.world_size()
    return slice(dist.rank() * part, (dist.rank() + 1) * part)


def shard(values: Values) -> None:
    """Keep this rank's columns of a whole table, and read from every rank's."""
    whole, own = values.weight, columns(values.weight.shape[1])
    values.read_sharded, values.dots_sharded, values.first_column = read_sharded, dots_sharded, own.start
    values.weight = nn.Parameter(whole.detach()[:, own].clone(), requires_grad=whole.requires_grad)


def read_sharded(values: Values, indices: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """As `Values.read`, where this rank holds d / R columns: indices (N, J), weights (N, J) -> (N, d)."""
    everyones = gather(indices).flatten(0, 1)
    part = values.read_columns(everyones, gather_differentiably(weights).flatten(0, 1), dtype)
    parts = exchange(part.view(dist.world_size(), len(indices), -1))
    return parts.transpose(0, 1).reshape(len(indices), -1)


def dots_sharded(values: Values, x: Tensor, indices: Tensor) -> Tensor:
    """As `Values.dots`, where this rank holds d / R columns: x (N, d), indices (N, J) -> (N, J).

    Each rank gets its columns of every rank's tokens, and sends each the products of these back, which are added up there.
    """
    ranks = dist.world_size()
    columns = exchange(x.view(len(x), ranks, -1).transpose(0, 1)).flatten(0, 1)
    parts = values.dots_columns(columns, gather(indices).flatten(0, 1))
    return exchange(parts.view(ranks, len(x), -1)).sum(0)


def sum_gradient(values: Values) -> None:
    """Put the sum over ranks in place of each rank's compact gradient of a replicated table.

    Moves K bytes to agree on the rows, then U x d numbers: at most those K bytes more than the whole table would be.
    """
    own = values.gradient()
    slots, width = values.weight.shape
    device = values.weight.device
    read = torch.zeros(slots, dtype=torch.uint8, device=device)
    if own is not None:
        read[own.rows] = 1
    td.all_reduce(read, op=td.ReduceOp.MAX)
    rows = read.nonzero().squeeze(1)
    total = torch.zeros(len(rows), width, dtype=torch.float32, device=device)
    if own is not None:
        total[torch.searchsorted(rows, own.rows)] = own.values.float()
    values.set_gradient(RowGradient(rows, dist.all_reduce(total)) if len(rows) else None)
