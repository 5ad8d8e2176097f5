"""Whether a checkpoint is what its manifest says: looked at by one process, or by all ranks together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pkm import files
from pkm.checkpoint import manifest, shards
from pkm.checkpoint.manifest import Damaged, Manifest
from pkm.distributed import dist
from pkm.errors import UserError


def check(directory: Path, said: Manifest, names: Iterable[str]) -> None:
    """Hash these files of a checkpoint and compare what is in them with what its manifest said. Damaged, with the file and the reason."""
    bare = shards.uncovered(said["tensors"])
    if bare is not None:
        raise Damaged(f"its manifest names parts of {bare} that are not the whole of it")
    for name in names:
        path, entry = directory / name, said["files"][name]
        if not shards.FILE.fullmatch(name):
            raise Damaged(f"its manifest names {name!r}, which is no safetensors file of a rank")
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise Damaged(f"{name} has {size:,} bytes instead of {entry['bytes']:,}")
            if files.sha256(path) != entry["sha256"]:
                raise Damaged(f"{name} has changed since it was written: its sha256 differs")
            differs = shards.problem(said["tensors"], name, path)
        except FileNotFoundError as error:
            raise Damaged(f"{name} is missing") from error
        except (OSError, UserError, ValueError) as error:
            raise Damaged(f"{name} cannot be read: {getattr(error, 'what', error)}") from error
        if differs is not None:
            raise Damaged(differs)


def verify(directory: Path) -> Manifest:
    """The manifest of a checkpoint of which this process alone has checked every file. Damaged, with the reason."""
    found = manifest.read(directory)
    check(directory, found, found["files"])
    return found


def verify_together(directory: Path, group: dist.Group = None) -> Manifest | str:
    """The manifest of a checkpoint of which each rank has checked a share of the files, or why it cannot be trusted.

    Every rank must call it; all get the same answer. A rank does not hash the file that it may just have written itself:
    another one must be able to see that.
    """
    found: Manifest | str = ""
    with dist.raise_on_all_ranks(group):
        if dist.is_main():
            try:
                found = manifest.read(directory)
            except (Damaged, OSError) as damage:
                found = str(damage)
    found = dist.broadcast_object(found, group)
    if isinstance(found, str):
        return found
    damage_here = None
    try:
        share = list(found["files"])[(dist.rank() + 1) % dist.world_size() :: dist.world_size()]
        check(directory, found, share)
    except Damaged as damage:
        damage_here = str(damage)
    damaged = [damage for damage in dist.gather_objects(damage_here, group) if damage is not None]
    return damaged[0] if damaged else found
