"""How much of the input may be unreadable before a preparation stops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pkm.errors import UserError

# Before all is read, a preparation stops only after this share of the input and so far beyond the limit.
EARLY_SHARE, EARLY_FACTOR = 0.05, 3.0
# Where more than this is damaged, something else is wrong, and the error does not advise to raise the limit.
MUCH = 0.2


class DamageLimit:
    """Compares the damage that read tasks report with the share that is allowed.

    Two shares count: damaged records among all records, and bytes lost (files that end early, and the like) among all.
    """

    def __init__(self, allowed: float, total_bytes: int):
        self.allowed, self.total_bytes = allowed, max(total_bytes, 1)
        self.records = self.damaged = self.lost_bytes = 0
        self.dropped: Counter[str] = Counter()
        self.named: list[list[str]] = []

    def add(self, report: dict[str, Any]) -> None:
        """Count in the report of a finished task."""
        self.records += report["records"]
        self.damaged += report["dropped"].get("damaged", 0)
        self.lost_bytes += report["lost_bytes"]
        self.dropped.update(report["dropped"])
        self.named += report["named"]

    def check_early(self, done: float) -> None:
        """UserError where the damage is already far beyond what is allowed; done: share of the input that was read."""
        if done >= EARLY_SHARE and self.damaged > EARLY_FACTOR * self.allowed * self.records / done + 10:
            self._stop()
        if self.lost_bytes > self.allowed * self.total_bytes:
            self._stop()

    def check(self) -> None:
        """UserError where the damage is beyond what is allowed."""
        if self.damaged > self.allowed * self.records or self.lost_bytes > self.allowed * self.total_bytes:
            self._stop()

    def _stop(self) -> None:
        records, lost = self.damaged / max(self.records, 1), self.lost_bytes / self.total_bytes
        fix = "do what is said there, or leave these files out of `sources`"
        if (share := max(records, lost)) <= MUCH:
            fix += f"; or have them passed over: limits.damaged={nice(share)}"
        raise UserError(
            f"too much of the input is damaged: {self.damaged} of {self.records} records ({records:.2%}) and "
            f"{lost:.2%} of the bytes; {self.allowed:.2%} are allowed{examples(self.named, 'damaged')}",
            where="limits.damaged",
            fix=fix,
        )


def examples(named: Iterable[list[str]], *kinds: str, most: int = 5) -> str:
    """The first few named records of some kinds, a line each."""
    chosen = [f"\n    {where}: {why}" for kind, where, why in named if kind in kinds][:most]
    return ("\n  for example" + "".join(chosen)) if chosen else ""


def nice(share: float) -> float:
    """A round number not below `share`."""
    for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5):
        if share < step:
            return step
    return 1.0
