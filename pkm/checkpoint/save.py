"""How a checkpoint is written: whole or not at all, read back, and only then an older one goes.

What one rank cannot do ends the save on all of them; the checkpoints before stay as they were.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pkm import files
from pkm.checkpoint import kill_points, manifest, shards, tensor_file
from pkm.checkpoint.manifest import Manifest
from pkm.checkpoint.retention import Retention
from pkm.distributed import dist
from pkm.errors import UserError
from pkm.machine import code_version

_POINTS = "begin in-shard after-shard after-manifest after-rename after-verify after-pointers in-retention end"
POINTS = tuple(f"checkpoint:{point}" for point in _POINTS.split())
"""Where a save can be made to die by SIGKILL (pkm.checkpoint.kill_points)."""

_SLACK_BYTES = 1 << 20


@dataclass(frozen=True)
class Save:
    """What goes into a checkpoint."""

    step: int
    parts: dict[str, shards.Part]
    """What this rank writes."""
    total_bytes: int
    """Of the tensors, over all ranks."""
    record: dict[str, Any]
    best: bool


def publish(save: Save, kept: Retention, group: dist.Group) -> None:
    """Write a checkpoint, point to it and let older ones go; nothing is written if an intact one of that step is there.

    Every rank must call it. UserError on all of them if one cannot write; no half of this checkpoint remains.
    """
    unfinished = kept.directory(save.step).with_name(kept.directory(save.step).name + ".tmp")
    try:
        there = False
        with stage(save.step, kept, group):
            if dist.is_main():
                kept.root.mkdir(parents=True, exist_ok=True)
                kept.sweep()
                there = kept.intact(save.step)
                if not there:
                    _refuse_if_full(kept.root, save.total_bytes)
                    unfinished.mkdir()
        if not dist.broadcast_object(there, group):
            _write(save, unfinished, kept, group)
        with stage(save.step, kept, group):
            kill_points.point("checkpoint:after-verify")
            if dist.is_main():
                kept.point(save.step, save.step if save.best else kept.best())
            kill_points.point("checkpoint:after-pointers")
            if dist.is_main():
                kept.retain(save.step)
            kill_points.point("checkpoint:end")
    finally:
        if dist.is_main():
            with suppress(UserError):  # another process's save may have that name now
                kept.refuse_if_taken_over()
                shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def stage(step: int, kept: Retention, group: dist.Group) -> Iterator[None]:
    """A stage of the save of `step`: what one rank cannot do is a UserError on every rank.

    So is, before anything of it is done, that another process took the run over.
    """
    with dist.raise_on_all_ranks(group):
        try:
            kept.refuse_if_taken_over()
            yield
        except OSError as error:
            refusal = files.refusal(error, kept.root)
            reason = refusal if isinstance(refusal, UserError) else UserError(str(error))
            raise _cannot_save(step, kept, reason) from error
        except UserError as error:
            raise _cannot_save(step, kept, error) from error


def refuse_not_finite(parts: dict[str, shards.Part]) -> None:
    """UserError that names the tensors with NaN or infinities: saved, they would push out checkpoints that are good.

    One pass over the numbers where they lie, without a copy.
    """
    of_numbers = {name: part.tensor for name, part in parts.items() if part.tensor.is_floating_point()}
    bad = [n for n, t in of_numbers.items() if t.numel() and not all(end.isfinite() for end in t.detach().aminmax())]
    if bad:
        more = f" and {len(bad) - 3} more" if bad[3:] else ""
        fix = "lower optim.dense.lr or optim.values.lr, or warm up longer, in a run with another name"
        raise UserError(f"there are numbers that are not finite in {', '.join(bad[:3])}{more}", fix=fix)


def _write(save: Save, unfinished: Path, kept: Retention, group: dist.Group) -> None:
    with stage(save.step, kept, group):
        kill_points.point("checkpoint:begin")
        file = shards.file_of(dist.rank())
        size, digest = tensor_file.write(unfinished / file, {name: p.tensor for name, p in save.parts.items()})
        kill_points.point("checkpoint:after-shard")
    shard = (file, {"bytes": size, "sha256": digest}, shards.listed(file, save.parts))
    everyones = dist.gather_objects(shard, group)
    final = kept.directory(save.step)
    with stage(save.step, kept, group):
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
            kept.refuse_if_taken_over()
            if final.exists():
                final.rename(final.with_name(final.name + ".damaged"))
            files.publish(unfinished, final)
        kill_points.point("checkpoint:after-rename")
    with stage(save.step, kept, group):
        found = kept.verify_together(final, group)
        if isinstance(found, str):
            raise UserError(f"what was written reads back differently: {found}", fix="have the disk checked")


def _refuse_if_full(root: Path, needed: int) -> None:
    needed, free = needed + _SLACK_BYTES, files.free_bytes(root)
    if free < needed:
        what = f"it takes {needed / 1e6:,.1f} MB and the disk has {free / 1e6:,.1f} MB free"
        raise UserError(what, fix="free some space, then run the same command again")


def _cannot_save(step: int, kept: Retention, reason: UserError) -> UserError:
    before: list[int] = []
    with suppress(UserError):
        before = [s for s in kept.steps() if s != step]
    rank = f" (rank {dist.rank()})" if dist.world_size() > 1 else ""
    goes_on = f" (the run goes on from step {before[-1]})" if before else ""
    fix = (reason.fix or "make that directory writable, then run the same command again") + goes_on
    return UserError(f"cannot save the checkpoint of step {step}: {reason.what}{rank}", str(kept.root), fix)
