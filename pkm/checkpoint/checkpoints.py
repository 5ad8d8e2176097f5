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

import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pkm import files
from pkm.checkpoint import kill_points, manifest, shards, tensor_file
from pkm.checkpoint.background import Background, Copies
from pkm.checkpoint.load import Loaded
from pkm.checkpoint.manifest import Damaged, Manifest
from pkm.checkpoint.retention import Retention
from pkm.distributed import dist
from pkm.errors import UserError
from pkm.machine import code_version

POINTS = tuple(
    f"checkpoint:{point}"
    for point in (
        "begin",
        "in-shard",
        "after-shard",
        "after-manifest",
        "after-rename",
        "after-verify",
        "after-pointers",
        "in-retention",
        "end",
    )
)
"""Where a save can be made to die by SIGKILL (pkm.checkpoint.kill_points)."""

_SLACK_BYTES = 1 << 20


@dataclass(frozen=True)
class _Save:
    step: int
    parts: dict[str, shards.Part]
    total_bytes: int
    record: dict[str, Any]
    best: bool


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


class Checkpoints:
    """The checkpoints below `root`, of which the newest `keep` stay, and the best one besides.

    warn             is told, in one line each, of every damaged or half-written checkpoint
    before_save      makes durable what a checkpoint takes for granted (the metrics up to its step)
    in_background    `save` copies the tensors and returns; a thread writes them, one save at a time
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        warn: Callable[[str], None] = _warn,
        before_save: Callable[[], None] = lambda: None,
        in_background: bool = False,
    ):
        self.root, self.before_save, self.in_background = root, before_save, in_background
        self.longest_seconds = 0.0
        """Of the saves so far, from their beginning to their end."""
        self._warn = warn
        self._kept = Retention(root, keep)
        self._copies = Copies()
        self._saving: Background | None = None
        self._side: list[dist.Group] = []

    def steps(self) -> list[int]:
        """Steps of the checkpoints there are, damaged or not, oldest first. UserError if they cannot be listed."""
        return self._kept.steps()

    def directory(self, step: int) -> Path:
        return self._kept.directory(step)

    # ---- save -------------------------------------------------------------------------------------------------

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

        UserError, on every rank, if one of them cannot write; the checkpoints before stay as they were and no half of this
        one remains. In the background that is the error of `wait`, or of the next `save`.
        """
        self.wait()
        with self._stage(step, None):
            if dist.is_main():
                self.before_save()
        parts = shards.own_parts(tensors, columns)
        if not self.in_background:
            self._save(_Save(step, parts, shards.total_bytes(tensors, columns), record, best), None)
            return self.directory(step)
        copies = self._copies.take({name: part.tensor for name, part in parts.items()})
        parts = {name: shards.Part(copies[name], part.start, part.whole) for name, part in parts.items()}
        save = _Save(step, parts, shards.total_bytes(tensors, columns), record, best)
        if not self._side:
            self._side.append(dist.background_group())
        self._saving = Background(lambda: self._save(save, self._side[0]))
        return self.directory(step)

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

    def _save(self, save: _Save, group: dist.Group) -> None:
        started = time.perf_counter()
        unfinished = self.directory(save.step).with_name(self.directory(save.step).name + ".tmp")
        try:
            there = False
            with self._stage(save.step, group):
                if dist.is_main():
                    self.root.mkdir(parents=True, exist_ok=True)
                    self._kept.sweep()
                    there = self._kept.intact(save.step)
                    if not there:
                        self._refuse_if_full(save.total_bytes)
                        unfinished.mkdir()
            if not dist.broadcast_object(there, group):
                self._write(save, unfinished, group)
            with self._stage(save.step, group):
                kill_points.point("checkpoint:after-verify")
                if dist.is_main():
                    self._kept.point(save.step, save.step if save.best else self._kept.best())
                kill_points.point("checkpoint:after-pointers")
                if dist.is_main():
                    self._kept.retain(save.step)
                kill_points.point("checkpoint:end")
        finally:
            if dist.is_main():
                shutil.rmtree(unfinished, ignore_errors=True)
        self.longest_seconds = max(self.longest_seconds, time.perf_counter() - started)

    def _write(self, save: _Save, unfinished: Path, group: dist.Group) -> None:
        with self._stage(save.step, group):
            kill_points.point("checkpoint:begin")
            file = f"rank-{dist.rank():05d}{tensor_file.SUFFIX}"
            size, digest = tensor_file.write(unfinished / file, {name: p.tensor for name, p in save.parts.items()})
            kill_points.point("checkpoint:after-shard")
        shard = (file, {"bytes": size, "sha256": digest}, shards.listed(file, save.parts))
        everyones = dist.gather_objects(shard, group)
        with self._stage(save.step, group):
            if dist.is_main():
                written: Manifest = {
                    "format": manifest.FORMAT,
                    "step": save.step,
                    "best": save.best,
                    "code": code_version(),
                    "files": {name: entry for name, entry, _ in everyones},
                    "tensors": shards.merged([entries for _, _, entries in everyones]),
                    "record": save.record,
                }
                files.atomic_write(unfinished / manifest.FILE, manifest.sealed(written))
                files.fsync_directory(unfinished)
            kill_points.point("checkpoint:after-manifest")
            if dist.is_main():
                final = self.directory(save.step)
                if final.exists():
                    final.rename(final.with_name(final.name + ".damaged"))
                files.publish(unfinished, final)
            kill_points.point("checkpoint:after-rename")
        with self._stage(save.step, group):
            found = self._read_together(self.directory(save.step), group)
            if isinstance(found, str):
                raise UserError(f"what was written reads back differently: {found}", fix="have the disk checked")

    @contextmanager
    def _stage(self, step: int, group: dist.Group) -> Iterator[None]:
        """A stage of a save: what one rank cannot do ends the save on all of them."""
        with dist.raise_on_all_ranks(group):
            try:
                yield
            except OSError as error:
                refusal = files.refusal(error, self.root)
                raise self._cannot_save(
                    step, refusal if isinstance(refusal, UserError) else UserError(str(error))
                ) from error
            except UserError as error:
                raise self._cannot_save(step, error) from error

    def _refuse_if_full(self, needed: int) -> None:
        needed, free = needed + _SLACK_BYTES, files.free_bytes(self.root)
        if free < needed:
            raise UserError(
                f"it takes {needed / 1e6:,.1f} MB and the disk has {free / 1e6:,.1f} MB free",
                fix="free some space, then run the same command again",
            )

    def _cannot_save(self, step: int, reason: UserError) -> UserError:
        before: list[int] = []
        with suppress(UserError):
            before = [s for s in self.steps() if s != step]
        rank = f" (rank {dist.rank()})" if dist.world_size() > 1 else ""
        return UserError(
            f"cannot save the checkpoint of step {step}: {reason.what}{rank}",
            where=str(self.root),
            fix=(reason.fix or "see to it") + (f" (the run goes on from step {before[-1]})" if before else ""),
        )

    # ---- load -------------------------------------------------------------------------------------------------

    def newest(self) -> Loaded | None:
        """The newest checkpoint that verifies, to go on from; None if there is none at all.

        Every damaged or half-written one on the way is named, and what a killed save left undone is done: pointers,
        retention. UserError if there are some and none verifies. Only for the processes that hold the run; others `load`.
        """
        for leftover in sorted(self.root.glob("step-*.tmp")):
            self.warn(f"{leftover} is half-written (its save was killed) and is ignored")
        loaded = self._newest()
        if loaded is not None:
            with dist.raise_on_all_ranks(), files.explained(self.root):
                if dist.is_main():
                    self._kept.repair_pointers(loaded.step)
                    self._kept.retain(loaded.step)
        return loaded

    def warn(self, line: str) -> None:
        """Say it once, not on every rank."""
        if dist.is_main():
            self._warn(line)

    def _newest(self) -> Loaded | None:
        self.wait()
        steps: list[int] = []
        with dist.raise_on_all_ranks():
            if dist.is_main():
                steps = self.steps()
        steps = dist.broadcast_object(steps)
        for step in reversed(steps):
            loaded = self._load(self.directory(step))
            if isinstance(loaded, str):
                self.warn(f"checkpoint {self.directory(step)} is damaged: {loaded}")
                continue
            if step != steps[-1]:
                self.warn(f"going on from step {step}, the newest checkpoint that is whole")
            return loaded
        if steps:
            raise dist.raised_by_rank_0(
                UserError(
                    f"none of the {len(steps)} checkpoints can be used (named above)",
                    where=str(self.root),
                    fix="bring one back from a copy; to begin again from step 0, move this directory away",
                )
            )
        return None

    def load(self, which: int | str | Path) -> Loaded:
        """The checkpoint of a step, of a directory, or named "latest" (newest that verifies) or "best".

        UserError if it is not there or damaged.
        """
        if which == "latest":
            loaded = self._newest()
            if loaded is None:
                raise dist.raised_by_rank_0(
                    UserError("there is no checkpoint", where=str(self.root), fix="train first")
                )
            return loaded
        self.wait()
        directory = self.root
        with dist.raise_on_all_ranks():
            if dist.is_main():
                directory = self._find(which)
        directory = dist.broadcast_object(directory)
        found = self._load(directory)
        if isinstance(found, str):
            raise dist.raised_by_rank_0(UserError(f"damaged: {found}", str(directory), "load another checkpoint"))
        return found

    def _find(self, which: int | str | Path) -> Path:
        if which == "best":
            step = self._kept.best()
            if step is None:
                raise UserError("no checkpoint was marked best", where=str(self.root), fix="load the latest one")
            which = step
        if isinstance(which, int) or (isinstance(which, str) and which.isdigit()):
            directory = self.directory(int(which))
        else:
            directory = Path(which)
        if not directory.is_dir():
            have = ", ".join(map(str, self.steps())) or "none"
            raise UserError("there is no such checkpoint", where=str(directory), fix=f"there are, of steps: {have}")
        return directory

    def _load(self, directory: Path) -> Loaded | str:
        found = self._read_together(directory)
        if isinstance(found, str):
            return found
        if found["code"]["torch"] != code_version()["torch"]:
            self.warn(
                f"{directory.name} was written under torch {found['code']['torch']}, this is "
                f"{code_version()['torch']}: last bits may differ"
            )
        return Loaded(found["step"], found["record"], directory, found["tensors"])

    def _read_together(self, directory: Path, group: dist.Group = None) -> Manifest | str:
        """The manifest of a checkpoint of which the ranks hash a share of the files each, or why it cannot be trusted.

        A rank does not hash the file that it may just have written itself: another one must be able to see that.
        """
        found: Manifest | str = ""
        state: tuple[Any, ...] = ()
        with dist.raise_on_all_ranks(group):
            if dist.is_main():
                try:
                    found = manifest.read(directory)
                    state = self._kept.state(directory)
                except (Damaged, OSError) as damage:
                    found = str(damage)
        found = dist.broadcast_object(found, group)
        if isinstance(found, str):
            return found
        damage_here = None
        try:
            share = list(found["files"])[(dist.rank() + 1) % dist.world_size() :: dist.world_size()]
            manifest.check(directory, found, share)
        except Damaged as damage:
            damage_here = str(damage)
        damaged = [damage for damage in dist.gather_objects(damage_here, group) if damage is not None]
        if damaged:
            return damaged[0]
        if dist.is_main() and directory.parent == self.root:
            self._kept.seen_intact[int(found["step"])] = state
        return found
