"""Checkpoints of a run: saved whole or not at all, verified on load, retained by rule.

    checkpoints/step-0000123/rank-00000.safetensors     the tensors
                             manifest.json              sizes and hashes of the files, shapes, the record; hashes itself
    checkpoints/latest  best                            names of checkpoints, for people and programs

A save writes `step-0000123.tmp/`, renames it, reads it back, and only then lets an older checkpoint go. A directory of
that name is never written into again. Nothing in a checkpoint is code: safetensors and JSON, anything else is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from pkm import faults, files, tensorfile
from pkm.errors import UserError
from pkm.version import code_version

FORMAT = 1
MANIFEST = "manifest.json"
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
"""Where a save can be made to die by SIGKILL (pkm.faults)."""

_NAME = re.compile(r"step-(\d{7,})")
_SHARD = re.compile(r"rank-\d{5}\.safetensors")
_SLACK_BYTES = 1 << 20


class Damaged(Exception):
    """Why a checkpoint cannot be trusted."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was verified."""

    step: int
    tensors: dict[str, Tensor]
    """On the CPU."""
    record: dict[str, Any]
    directory: Path


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


class Checkpoints:
    """The checkpoints below `root`, of which the newest `keep` stay, and the best one besides.

    warn           is told, in one line each, of every damaged or half-written checkpoint
    before_save    makes durable what a checkpoint takes for granted (the metrics up to its step)
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        warn: Callable[[str], None] = _warn,
        before_save: Callable[[], None] = lambda: None,
    ):
        self.root, self.keep, self.warn, self.before_save = root, keep, warn, before_save
        self._seen_intact: dict[int, tuple[Any, ...]] = {}

    def steps(self) -> list[int]:
        """Steps of the checkpoints there are, damaged or not, oldest first. UserError if they cannot be listed."""
        try:
            names = [entry.name for entry in self.root.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(
                f"cannot list the checkpoints: {error.strerror}", where=str(self.root), fix="make it readable"
            ) from error
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def directory(self, step: int) -> Path:
        return self.root / f"step-{step:07d}"

    # ---- save -------------------------------------------------------------------------------------------------

    def save(self, step: int, tensors: dict[str, Tensor], record: dict[str, Any], best: bool = False) -> Path:
        """Publish a checkpoint and return its directory; nothing is written if an intact one of that step is there.

        tensors    any devices, any of `tensorfile.DTYPES`
        record     JSON: whatever else the run needs to go on
        best       keep this one until a better one is saved

        UserError if it cannot be written; the checkpoints before stay as they were and no half of this one remains.
        """
        final = self.directory(step)
        unfinished = final.with_name(final.name + ".tmp")
        try:
            self.before_save()
            self.root.mkdir(parents=True, exist_ok=True)
            self._sweep(".tmp")
            if not self._intact(step):
                self._refuse_if_full(tensors)
                self._write(unfinished, step, tensors, record, best)
                if final.exists():
                    final.rename(final.with_name(final.name + ".damaged"))
                files.publish(unfinished, final)
                faults.point("checkpoint:after-rename")
                self._verify(step)
            faults.point("checkpoint:after-verify")
            self._point(step, step if best else self._best())
            faults.point("checkpoint:after-pointers")
            self._retain(step)
            faults.point("checkpoint:end")
        except OSError as error:
            refusal = files.refusal(error, self.root)
            explained = refusal if isinstance(refusal, UserError) else UserError(str(error))
            raise self._cannot_save(step, explained) from error
        except UserError as error:
            raise self._cannot_save(step, error) from error
        except Damaged as damage:
            differs = UserError(f"what was written reads back differently: {damage}", fix="have the disk checked")
            raise self._cannot_save(step, differs) from damage
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return final

    def _write(self, path: Path, step: int, tensors: dict[str, Tensor], record: dict[str, Any], best: bool) -> None:
        path.mkdir()
        faults.point("checkpoint:begin")
        shard = "rank-00000" + tensorfile.SUFFIX
        size, digest = tensorfile.write(path / shard, tensors)
        faults.point("checkpoint:after-shard")
        manifest = {
            "format": FORMAT,
            "step": step,
            "best": best,
            "code": code_version(),
            "files": {shard: {"bytes": size, "sha256": digest}},
            "tensors": {
                name: {
                    "dtype": tensorfile.DTYPES[tensor.dtype],
                    "shape": list(tensor.shape),
                    "parts": [{"file": shard, "start": [0] * tensor.ndim, "shape": list(tensor.shape)}],
                }
                for name, tensor in tensors.items()
            },
            "record": record,
        }
        files.atomic_write(path / MANIFEST, _sealed(manifest))
        files.fsync_directory(path)
        faults.point("checkpoint:after-manifest")

    def _refuse_if_full(self, tensors: dict[str, Tensor]) -> None:
        needed = sum(tensor.nbytes for tensor in tensors.values()) + _SLACK_BYTES
        free = files.free_bytes(self.root)
        if free < needed:
            raise UserError(
                f"it takes {needed / 1e6:,.1f} MB and the disk has {free / 1e6:,.1f} MB free",
                fix="free some space, then run the same command again",
            )

    def _cannot_save(self, step: int, reason: UserError) -> UserError:
        before = [s for s in self.steps() if s != step]
        return UserError(
            f"cannot save the checkpoint of step {step}: {reason.what}",
            where=str(self.root),
            fix=(reason.fix or "see to it") + (f" (the run goes on from step {before[-1]})" if before else ""),
        )

    # ---- retention --------------------------------------------------------------------------------------------

    def _retain(self, saved: int) -> None:
        """Remove what is older than the `keep` newest intact checkpoints; the best and the one just saved stay."""
        intact = [step for step in reversed(self.steps()) if self._intact(step)][: self.keep]
        best = self._best()
        for step in self.steps():
            if step < min(intact) and step not in (saved, best):
                doomed = self.directory(step)
                doomed.rename(doomed.with_name(doomed.name + ".tmp"))
                faults.point("checkpoint:in-retention")
        self._sweep(".tmp")
        self._sweep(".damaged")

    def _sweep(self, suffix: str) -> None:
        for leftover in self.root.glob(f"step-*{suffix}"):
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.root.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)

    def _verify(self, step: int) -> None:
        """`verify`, but files that did not change since they were found intact are not hashed again."""
        directory = self.directory(step)
        state = tuple(sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in directory.iterdir()))
        if self._seen_intact.get(step) != state:
            verify(directory)
            self._seen_intact[step] = state

    def _intact(self, step: int) -> bool:
        try:
            self._verify(step)
        except (OSError, Damaged, UserError):
            return False
        return True

    def _point(self, latest: int, best: int | None) -> None:
        for name, step in (("latest", latest), ("best", best)):
            if step is None:
                (self.root / name).unlink(missing_ok=True)
            else:
                files.atomic_write(self.root / name, self.directory(step).name + "\n")

    def _best(self) -> int | None:
        """Step of the best checkpoint, by the pointer; by the manifests if there is none that can be used."""
        try:
            match = _NAME.fullmatch((self.root / "best").read_text().strip())
        except (OSError, ValueError):
            match = None
        if match and self.directory(int(match[1])).is_dir():
            return int(match[1])
        marked = (step for step in reversed(self.steps()) if _says_best(self.directory(step)))
        return next(filter(self._intact, marked), None)

    def _put_right(self, latest: int) -> None:
        """Make the pointers what they were when the checkpoint of step `latest` was the newest.

        A save may have been killed between its rename and its pointers, and later checkpoints may be damaged.
        """
        pointed = self._best()
        best = [step for step in self.steps() if step == pointed or _says_best(self.directory(step))]
        self._point(latest, max((step for step in best if step <= latest), default=None))

    # ---- load -------------------------------------------------------------------------------------------------

    def newest(self) -> Loaded | None:
        """The newest checkpoint that verifies, to go on from; None if there is none at all.

        Every damaged or half-written one on the way is named, and what a killed save left undone is done: pointers,
        retention. UserError if there are some and none verifies. Only for the process that holds the run; others `load`.
        """
        for leftover in sorted(self.root.glob("step-*.tmp")):
            self.warn(f"{leftover} is half-written (its save was killed) and is ignored")
        loaded = self._newest()
        if loaded is not None:
            with files.explained(self.root):
                self._put_right(loaded.step)
                self._retain(loaded.step)
        return loaded

    def _newest(self) -> Loaded | None:
        steps = self.steps()
        for step in reversed(steps):
            try:
                loaded = self._load(self.directory(step))
            except Damaged as damage:
                self.warn(f"checkpoint {self.directory(step)} is damaged: {damage}")
                continue
            if step != steps[-1]:
                self.warn(f"going on from step {step}, the newest checkpoint that is whole")
            return loaded
        if steps:
            raise UserError(
                f"none of the {len(steps)} checkpoints can be used (named above)",
                where=str(self.root),
                fix="bring one back from a copy; to begin again from step 0, move this directory away",
            )
        return None

    def load(self, which: int | str | Path) -> Loaded:
        """The checkpoint of a step, of a directory, or named "latest" (newest that verifies) or "best".

        UserError if it is not there or damaged.
        """
        if which == "latest":
            loaded = self._newest()
            if loaded is None:
                raise UserError("there is no checkpoint", where=str(self.root), fix="train first")
            return loaded
        if which == "best":
            step = self._best()
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
        try:
            return self._load(directory)
        except Damaged as damage:
            raise UserError(f"damaged: {damage}", where=str(directory), fix="load another checkpoint") from damage

    def _load(self, directory: Path) -> Loaded:
        manifest = verify(directory)
        if manifest["code"]["torch"] != code_version()["torch"]:
            self.warn(
                f"{directory.name} was written under torch {manifest['code']['torch']}, this is "
                f"{code_version()['torch']}: last bits may differ"
            )
        try:
            shards = {name: tensorfile.read(directory / name) for name in manifest["files"]}
            tensors = {name: _assembled(name, entry, shards) for name, entry in manifest["tensors"].items()}
        except (OSError, ValueError, KeyError) as error:
            raise Damaged(str(error)) from error
        return Loaded(manifest["step"], tensors, manifest["record"], directory)


def verify(directory: Path) -> dict[str, Any]:
    """Hash every file of a checkpoint against its manifest, and return that. Damaged, with the file and the reason."""
    manifest = _manifest(directory)
    for name, entry in manifest["files"].items():
        path = directory / name
        if not _SHARD.fullmatch(name):
            raise Damaged(f"its manifest names {name!r}, which is no safetensors file of a rank")
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise Damaged(f"{name} has {size:,} bytes instead of {entry['bytes']:,}")
            if files.sha256(path) != entry["sha256"]:
                raise Damaged(f"{name} has changed since it was written: its sha256 differs")
        except FileNotFoundError as error:
            raise Damaged(f"{name} is missing") from error
        except (OSError, UserError) as error:
            raise Damaged(f"{name} cannot be read: {getattr(error, 'what', error)}") from error
    return manifest


def _manifest(directory: Path) -> dict[str, Any]:
    try:
        text = (directory / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise Damaged(f"{MANIFEST} is missing") from error
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error.strerror}") from error
    try:
        manifest = json.loads(text)
        del manifest["sha256"]
        if _sealed(manifest) != text:
            raise ValueError("its sha256 differs")
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{MANIFEST} has changed since it was written") from error
    if manifest["format"] != FORMAT:
        raise UserError(
            f"written in format {manifest['format']} of checkpoints; this version of pkm reads format {FORMAT}",
            where=str(directory),
            fix="use the version of pkm that wrote it",
        )
    return cast(dict[str, Any], manifest)


def _says_best(directory: Path) -> bool:
    try:
        return bool(_manifest(directory)["best"])
    except (Damaged, UserError):
        return False


def _sealed(manifest: dict[str, Any]) -> bytes:
    """The manifest's exact bytes: its JSON with the hash of the JSON without it."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": digest}, indent=1) + "\n").encode()


def _assembled(name: str, entry: dict[str, Any], shards: dict[str, dict[str, Tensor]]) -> Tensor:
    """A tensor out of its parts; ValueError if a file holds another shape or dtype than the manifest says."""
    pieces = [(part, shards[part["file"]][name]) for part in entry["parts"]]
    for part, piece in pieces:
        if list(piece.shape) != part["shape"] or tensorfile.DTYPES[piece.dtype] != entry["dtype"]:
            raise ValueError(
                f"{part['file']} holds {name} as {piece.dtype} {list(piece.shape)}, not as the manifest says"
            )
    if len(pieces) == 1:
        return pieces[0][1]
    whole = torch.empty(entry["shape"], dtype=pieces[0][1].dtype)
    for part, piece in pieces:
        whole[tuple(slice(a, a + n) for a, n in zip(part["start"], part["shape"], strict=True))] = piece
    return whole
