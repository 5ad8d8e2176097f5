"""Ranks and collectives. In a single process every collective is a no-op."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as td

from pkm.distributed import rendezvous
from pkm.errors import ReportedByOtherRank, UserError

T = TypeVar("T")
Group: TypeAlias = "td.ProcessGroup | None"


def rank() -> int:
    """This process among all processes of the run, from 0."""
    return td.get_rank() if td.is_initialized() else 0


def world_size() -> int:
    """Processes of the run, over all nodes."""
    return td.get_world_size() if td.is_initialized() else 1


def is_main() -> bool:
    """Whether this is the rank that writes what only one may write."""
    return rank() == 0


def start(device: torch.device) -> None:
    """Join the ranks that torchrun started (NCCL for GPUs, gloo otherwise); nothing to do without torchrun."""
    if td.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    try:
        # Tensors on the CPU travel by gloo in both cases.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store, rank, ranks = rendezvous.meet()
        td.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"cannot join the other ranks: {error}",
            where="environment",
            fix="start several ranks with torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        ) from error


def stop() -> None:
    """Leave the other ranks."""
    if td.is_initialized():
        td.destroy_process_group()


def share(rows: int) -> tuple[int, int]:
    """This rank's [first, last) of `rows`."""
    return rows * rank() // world_size(), rows * (rank() + 1) // world_size()


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Sum `tensor` over the ranks, in place, and return it."""
    if world_size() > 1:
        td.all_reduce(tensor)
    return tensor


def background_group() -> Group:
    """A second gloo group, so that collectives of a save in the background do not interleave with training's."""
    return td.new_group(backend="gloo", timeout=timedelta(hours=6)) if world_size() > 1 else None


def broadcast_object(obj: T, group: Group = None) -> T:
    """Rank 0's `obj` on every rank; anything that pickles."""
    if world_size() == 1:
        return obj
    box: list[Any] = [obj]
    td.broadcast_object_list(box, src=0, group=group)
    return cast(T, box[0])


def gather_objects(obj: T, group: Group = None) -> list[T]:
    """Every rank's `obj`, by rank, on every rank; anything that pickles."""
    if world_size() == 1:
        return [obj]
    everyones: list[Any] = [None] * world_size()
    td.all_gather_object(everyones, obj, group=group)
    return everyones


@contextmanager
def raise_on_all_ranks(group: Group = None) -> Iterator[None]:
    """If any rank raises a UserError inside, every rank raises it at the end, so that none waits for another.

    Of several errors it is the lowest rank's. That rank raises it as it is and prints it; the others raise it as
    ReportedByOtherRank, which is not printed again.
    """
    error: UserError | None = None
    try:
        yield
    except UserError as caught:
        error = caught
    met = gather_objects((error.what, error.where, error.fix) if error else None, group)
    first = next((at for at, found in enumerate(met) if found is not None), None)
    if first is None:
        return
    if error is not None and first == rank():
        raise error
    raise ReportedByOtherRank(*cast(Any, met[first])) from error


def raised_by_rank_0(error: UserError) -> UserError:
    """For an error that every rank raises alike: only rank 0 prints it."""
    return error if is_main() else ReportedByOtherRank(error.what, error.where, error.fix)


def loss_of_rank(error: BaseException | None) -> str | None:
    """The first line of `error` if a collective failed because another rank ended; None for any other error."""
    if not isinstance(error, RuntimeError):
        return None
    text = str(error).partition("This is typically")[0].strip()  # gloo's advice, which is none here
    signs = ("gloo", "connection", "nccl", "tcpstore")
    if isinstance(error, td.DistError) or any(sign in text.lower() for sign in signs):
        return re.sub(r"^\[\S+:\d+\] ", "", text).splitlines()[0].rstrip(".")
    return None
