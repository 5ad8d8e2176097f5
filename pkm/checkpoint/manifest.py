"""A checkpoint's manifest: sizes and hashes of its files, the tensors in them, the run's record; it hashes itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

from pkm.errors import UserError

FORMAT = 1
FILE = "manifest.json"
Manifest = dict[str, Any]


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
        what = f"written in format {manifest['format']} of checkpoints; this version of pkm reads format {FORMAT}"
        raise UserError(what, str(directory), "use the version of pkm that wrote it")
    return cast(Manifest, manifest)


def says_best(directory: Path) -> bool:
    """Whether the checkpoint was the best one when it was saved."""
    try:
        return bool(read(directory)["best"])
    except (Damaged, UserError):
        return False
