"""A checkpoint's manifest: sizes and hashes of its files, the tensors in them, the run's record; it hashes itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from pkm import files
from pkm.checkpoint import shards
from pkm.errors import UserError

FORMAT = 1
FILE = "manifest.json"
Manifest = dict[str, Any]

_SHARD = re.compile(r"rank-\d{5}\.safetensors")


class Damaged(Exception):
    """Why a checkpoint cannot be trusted."""


def sealed(manifest: Manifest) -> bytes:
    """The manifest's exact bytes: its JSON with the hash of the JSON without it."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": digest}, indent=1) + "\n").encode()


def read(directory: Path) -> Manifest:
    """The manifest of a checkpoint. Damaged if it has changed, UserError if a later version of pkm wrote it."""
    try:
        text = (directory / FILE).read_bytes()
    except FileNotFoundError as error:
        raise Damaged(f"{FILE} is missing") from error
    except OSError as error:
        raise Damaged(f"{FILE} cannot be read: {error.strerror}") from error
    try:
        manifest = json.loads(text)
        del manifest["sha256"]
        if sealed(manifest) != text:
            raise ValueError("its sha256 differs")
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{FILE} has changed since it was written") from error
    if manifest["format"] != FORMAT:
        raise UserError(
            f"written in format {manifest['format']} of checkpoints; this version of pkm reads format {FORMAT}",
            where=str(directory),
            fix="use the version of pkm that wrote it",
        )
    return cast(Manifest, manifest)


def check(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Hash these files of a checkpoint and compare what is in them. Damaged, with the file and the reason."""
    bare = shards.uncovered(manifest["tensors"])
    if bare is not None:
        raise Damaged(f"its manifest names parts of {bare} that are not the whole of it")
    for name in names:
        path, entry = directory / name, manifest["files"][name]
        if not _SHARD.fullmatch(name):
            raise Damaged(f"its manifest names {name!r}, which is no safetensors file of a rank")
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise Damaged(f"{name} has {size:,} bytes instead of {entry['bytes']:,}")
            if files.sha256(path) != entry["sha256"]:
                raise Damaged(f"{name} has changed since it was written: its sha256 differs")
            differs = shards.problem(manifest["tensors"], name, path)
        except FileNotFoundError as error:
            raise Damaged(f"{name} is missing") from error
        except (OSError, UserError, ValueError) as error:
            raise Damaged(f"{name} cannot be read: {getattr(error, 'what', error)}") from error
        if differs is not None:
            raise Damaged(differs)


def verify(directory: Path) -> Manifest:
    """`read`, and `check` of every file, by this process alone."""
    manifest = read(directory)
    check(directory, manifest, manifest["files"])
    return manifest


def says_best(directory: Path) -> bool:
    """Whether the checkpoint was the best one when it was saved."""
    try:
        return bool(read(directory)["best"])
    except (Damaged, UserError):
        return False
