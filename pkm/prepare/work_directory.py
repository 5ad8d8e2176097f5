"""The working directory of a preparation: `<output>.preparing`. What an earlier call left in it is used again, unless it is stale."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pkm import __version__
from pkm.errors import UserError
from pkm.files import atomic_write, explained, sha256
from pkm.prepare.input.sources import Input
from pkm.prepare.settings import PrepareConfig, settings_that_matter

# To be raised when the same settings and files give other bytes than before.
VERSION = 2
OUTPUTS = {
    "read": ("unpack", "unpack.json", "units.jsonl", "read", "logs/unpack", "logs/read"),
    "decide": (
        "near",
        "near_sign",
        "near_match",
        "logs/near_sign",
        "logs/near_match",
        "decide",
        "near.json",
        "mixture.json",
        "groups.json",
    ),
    "learn": ("count", "learn", "logs/count"),
    "encode": ("encode", "corpus", "logs/encode"),
}
"""Groups of stages that become stale together, in order, and what they write."""


def working_path(final: Path) -> Path:
    return final.with_name(final.name + ".preparing")


@contextmanager
def working_directory(final: Path) -> Iterator[Path]:
    """The working directory of the corpus to be at `final`, for one process at a time."""
    work = working_path(final)
    with explained(work):
        work.mkdir(parents=True, exist_ok=True)
        lock = open(work / "lock", "w")  # noqa: SIM115
    with lock:
        try:
            # Not flock: children of a killed preparation would still hold it.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise UserError("it is being prepared by another process", str(work), "wait for it, or stop it") from error
        yield work


def settings_of(config: PrepareConfig) -> dict[str, Any]:
    """The settings that decide the result."""
    return settings_that_matter(
        config, {"executor": True, "workers": True, "slurm": True, "output": True, "limits": {"damaged"}}
    )


def listing(inputs: list[Input]) -> dict[str, Any]:
    """What identifies the files that were read."""
    digest = hashlib.sha256(json.dumps([[file.url, file.size] for file in inputs]).encode()).hexdigest()
    return {"files": len(inputs), "bytes": sum(file.size for file in inputs), "listing_sha256": digest}


def discard_stale(config: PrepareConfig, inputs: list[Input], work: Path, say: Callable[[str], None]) -> None:
    """Remove what an earlier, unfinished call made from other settings or files; the rest is used again."""
    keys, file = _keys(config, inputs), work / "keys.json"
    then = json.loads(file.read_bytes()) if file.exists() else {}
    stale = [name for name in keys if then and then.get(name) != keys[name]]
    for name in stale:
        for path in (work / output for output in OUTPUTS[name]):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if then:
        fresh = f"; settings, files or pkm itself have changed: anew from `{stale[0]}` on" if stale else ""
        say(f"going on with the unfinished preparation in {work}{fresh}")
    atomic_write(file, json.dumps(keys))
    for name in ("unpack", "read", "near", "decide", "count", "learn", "encode", "corpus"):
        (work / name).mkdir(exist_ok=True)
        # Jobs that an earlier call submitted may still be writing theirs.
        if config.executor == "local":
            remove_unfinished(work / name)
    atomic_write(work / "config.json", config.model_dump_json())


def remove_unfinished(directory: Path) -> None:
    """Files that a killed worker had begun to write."""
    for path in directory.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def _keys(config: PrepareConfig, inputs: list[Input]) -> dict[str, str]:
    """For each group of stages, a hash of everything that its output follows from."""
    subwords = settings_that_matter(config)["subwords"]
    for name in ("codes_file", "vocab_file", "tokenizer"):
        if name in subwords:
            path = getattr(config.subwords, name)
            subwords[name] = sha256(path) if path else None
    read = [[file.identity() for file in inputs], config.filters.model_dump(exclude={"duplicates", "near_duplicates"})]
    if config.ids_given:
        read.append(subwords)
    parts: dict[str, list[Any]] = {
        "read": [VERSION, __version__, *read, config.limits.document_megabytes, config.tokenizer.normalize],
        "decide": [config.held_out.model_dump(), config.filters.duplicates, subwords["sample_megabytes"]],
        "learn": [subwords, config.tokenizer.model_dump()],
        "encode": [],
    }
    if config.filters.near_duplicates != "keep":
        parts["decide"].append("without near-duplicates")
    if config.weights:
        parts["decide"].append(config.weights)
    keys, so_far = {}, hashlib.sha256()
    for name, part in parts.items():
        so_far.update(json.dumps(part, sort_keys=True).encode())
        keys[name] = so_far.hexdigest()
    return keys
