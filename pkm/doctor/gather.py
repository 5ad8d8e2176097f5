"""What all ranks found out, on each of them.

Every rank calls the same checks in the same order. What one rank alone finds, also that something broke there, is
gathered over gloo; from there on all judge the same, so that no rank waits for one that gave up.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch.distributed as td

from pkm.distributed import dist
from pkm.doctor.finding import Finding
from pkm.errors import UserError

T = TypeVar("T")
PATIENCE_SECONDS = 300
"""How long to wait for a late rank: it may still be importing torch from a busy file system."""


def join() -> None:
    """Join the ranks that torchrun started, over gloo. UserError if they cannot reach each other."""
    try:
        td.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"rank {os.environ.get('RANK')} on {socket.gethostname()} cannot reach the others: {str(error).splitlines()[0]}",
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
            "have the nodes find each other by name and let their ports through; where nodes have several networks, name "
            "the shared one in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (`ip addr` lists them)",
        ) from error


@dataclass(frozen=True)
class Found(Generic[T]):
    """What every rank found, in the order of the ranks."""

    results: list[T]
    """Of the ranks that have one; of all if there are no problems."""
    problems: dict[int, str]
    """Rank -> why it has no result."""

    def failure(self, about: str, advice: str = "") -> Finding | None:
        """What to report if some ranks have no result."""
        if not self.problems:
            return None
        ranks: dict[str, list[int]] = {}
        for rank, why in self.problems.items():
            ranks.setdefault(why, []).append(rank)
        return Finding(about, "fail", "; ".join(f"rank {named(who)}: {why}" for why, who in ranks.items()), advice)


def gather_results(check: Callable[[], T]) -> Found[T]:
    """What `check` returns on each rank, or what it raises there."""
    mine: tuple[T | None, str | None]
    try:
        mine = check(), None
    except Exception as error:  # must not keep this rank from the next collective
        said = f"{error.where}: {error.what}" if isinstance(error, UserError) else str(error)
        mine = None, said or type(error).__name__
    gathered: list[Any] = [None] * dist.world_size()
    td.all_gather_object(gathered, mine)
    return Found(
        [result for result, why in gathered if why is None],
        {rank: why for rank, (_, why) in enumerate(gathered) if why is not None},
    )


def named(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> `0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
