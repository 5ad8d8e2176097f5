"""Checkpoints of a run: saved whole or not at all, verified on load, retained by rule.

    checkpoints/step-0000123/rank-00000.safetensors ...     the tensors, a file of each rank
                             manifest.json              sizes and hashes of the files, shapes, the record; hashes itself
    checkpoints/latest  best                            names of checkpoints, for people and programs

A save writes `step-0000123.tmp/`, renames it, reads it back, and only then lets an older checkpoint go. A directory of
that name is never written into again. Nothing in a checkpoint is code: safetensors and JSON, anything else is refused.

All ranks save and load together, and each decision is the same on all of them; rank 0 alone writes what is not a rank's file.
Any number of ranks, with values replicated or sharded, loads what any other wrote (pkm.checkpoint.shards).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from pkm import files
from pkm.checkpoint import load, shards
from pkm.checkpoint.background import Background, Copies
from pkm.checkpoint.load import Loaded
from pkm.checkpoint.retention import Retention
from pkm.checkpoint.save import Save, publish, refuse_not_finite, stage
from pkm.distributed import dist


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


class Checkpoints:
    """The checkpoints below `root`, of which the newest `keep` stay, and the best one besides.

    warn             is told, in one line each, of every damaged or half-written checkpoint
    before_save      makes durable what a checkpoint takes for granted (the metrics up to its step)
    in_background    `save` copies the tensors and returns; a thread writes them, one save at a time
    refuse_if_taken_over    raises UserError once `root` is another process's; from then on nothing is written there
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        warn: Callable[[str], None] = _warn,
        before_save: Callable[[], None] = lambda: None,
        in_background: bool = False,
        refuse_if_taken_over: Callable[[], None] = lambda: None,
    ):
        self.root, self.before_save, self.in_background = root, before_save, in_background
        self.longest_seconds = 0.0
        """Of the saves so far, from their beginning to their end."""
        self.newest_step = 0
        """Of the checkpoint that was loaded to go on from, or saved last; 0 before there is one."""
        self._warn_once = warn
        self._kept = Retention(root, keep, refuse_if_taken_over)
        self._copies = Copies()
        self._saving: Background | None = None
        self._side: list[dist.Group] = []

    def steps(self) -> list[int]:
        """Steps of the checkpoints there are, damaged or not, oldest first. UserError if they cannot be listed."""
        return self._kept.steps()

    def directory(self, step: int) -> Path:
        return self._kept.directory(step)

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        record: dict[str, Any],
        best: bool = False,
        columns: Collection[str] = (),
    ) -> Path:
        """Publish a checkpoint and return its directory; nothing is written if an intact one of that step is there.

        tensors    any devices, any of `tensor_file.DTYPES`; the same on every rank but for `columns`
        record     JSON: whatever else the run needs to go on
        best       keep this one until a better one is saved
        columns    names of tensors of which each rank holds its own columns

        UserError, on every rank, if a number is not finite or one rank cannot write; the checkpoints before stay as they were and no half of this
        one remains. In the background that is the error of `wait`, or of the next `save`.
        """
        self.wait()
        parts = shards.own_parts(tensors, columns)
        with stage(step, self._kept, None):
            refuse_not_finite(parts)
            if dist.is_main():
                self.before_save()
        total_bytes = shards.total_bytes(tensors, columns)
        if not self.in_background:
            self._publish(Save(step, parts, total_bytes, record, best), None)
            return self.directory(step)
        copies = self._copies.take({name: part.tensor for name, part in parts.items()})
        parts = {name: shards.Part(copies[name], part.start, part.whole) for name, part in parts.items()}
        save = Save(step, parts, total_bytes, record, best)
        if not self._side:
            self._side.append(dist.background_group())
        self._saving = Background(lambda: self._publish(save, self._side[0]))
        return self.directory(step)

    def _publish(self, save: Save, group: dist.Group) -> None:
        started = time.perf_counter()
        publish(save, self._kept, group)
        self.newest_step = save.step
        self.longest_seconds = max(self.longest_seconds, time.perf_counter() - started)

    def wait(self) -> None:
        """Until no save is going on in the background; UserError if it failed."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.wait()

    def saving(self) -> bool:
        """Whether a save is going on in the background."""
        return self._saving is not None and not self._saving.done()

    def failed(self) -> bool:
        """Whether a save in the background has failed: `wait` says why."""
        return self._saving is not None and self._saving.failed()

    def newest(self) -> Loaded | None:
        """The newest checkpoint that verifies, to go on from; None if there is none at all.

        Every damaged or half-written one on the way is named, and what a killed save left undone is done: pointers,
        retention. UserError if there are some and none verifies. Only for the processes that hold the run; others `load`.
        """
        self.wait()
        for leftover in sorted(self.root.glob("step-*.tmp")):
            self._warn(f"{leftover} is half-written (its save was killed) and is ignored")
        loaded = load.newest(self._kept, self._warn)
        if loaded is not None:
            self.newest_step = loaded.step
            with dist.raise_on_all_ranks(), files.explained(self.root):
                if dist.is_main():
                    self._kept.repair_pointers(loaded.step)
                    self._kept.retain(loaded.step)
        return loaded

    def load(self, which: int | str | Path) -> Loaded:
        """The checkpoint of a step, of a directory, or named "latest" (newest that verifies) or "best"; writes nothing.

        UserError if it is not there or damaged.
        """
        self.wait()
        return load.load(self._kept, which, self._warn)

    def _warn(self, line: str) -> None:
        """Said by rank 0 for all of them."""
        if dist.is_main():
            self._warn_once(line)
