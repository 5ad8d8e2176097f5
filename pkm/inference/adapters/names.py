"""A table of names: which tensors of another program's file make which of ours, and back.

A format's table is a list of `Entry`, complete for one model: no patterns, so that what is left over is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pkm.errors import UserError

SHOWN = 8
"""Names that a message lists."""


def _one(*tensors: Tensor) -> Tensor:
    (tensor,) = tensors
    return tensor


class Entry(NamedTuple):
    """One tensor of ours."""

    ours: str
    theirs: tuple[str, ...]
    """What it is made of, in the order in which the maps take it."""
    to_ours: Callable[..., Tensor] = _one
    to_theirs: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: [tensor]


def same(ours: str, theirs: str) -> Entry:
    return Entry(ours, (theirs,))


def stacked(ours: str, theirs: Sequence[str], rows: Sequence[int]) -> Entry:
    """Ours holds theirs one below the other; rows: of each."""
    return Entry(ours, tuple(theirs), lambda *parts: torch.cat(parts), lambda whole: whole.split(list(rows)))


def to_ours(table: Sequence[Entry], theirs: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Our tensors by our names. UserError that names what is missing and what the table says nothing of."""
    wanted = {name for entry in table for name in entry.theirs}
    if missing := sorted(wanted - theirs.keys()):
        what = f"it lacks {_listed(missing)}"
        raise UserError(what, where, "give the whole file, and check the settings that it is read with")
    if left := sorted(theirs.keys() - wanted):
        raise UserError(f"there is nothing here that {_listed(left)} could be", where, "see the table in README.md")
    found = {}
    for entry in table:
        try:
            found[entry.ours] = entry.to_ours(*(theirs[name] for name in entry.theirs))
        except (RuntimeError, ValueError, IndexError) as error:
            shapes = ", ".join(f"{name} {tuple(theirs[name].shape)}" for name in entry.theirs)
            what = f"{shapes} cannot be {entry.ours}: {str(error).splitlines()[0]}"
            raise UserError(what, where, "give the whole file, and the settings that it was made with") from None
    return found


def to_theirs(table: Sequence[Entry], ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """The other way; every name of ours has its entry."""
    found: dict[str, Tensor] = {}
    for entry in table:
        found |= zip(entry.theirs, entry.to_theirs(ours[entry.ours]), strict=True)
    assert ours.keys() == {entry.ours for entry in table}
    return found


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
