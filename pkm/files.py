"""Files that are either whole or not there: atomic writes, fsync, hashes, directories published by one rename."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pkm.errors import UserError

# errno -> (what happened, how to fix it): the ways in which a file system says no that a user can do something about.
_REFUSALS = {
    errno.ENOSPC: ("the disk is full", "free some space, then run the same command again"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, then run the same command again"),
    errno.EACCES: ("no permission", "change its permissions or choose another path"),
    errno.EPERM: ("no permission", "change its permissions or choose another path"),
    errno.EROFS: ("the file system is read-only", "choose a path on one that can be written"),
    errno.EEXIST: ("a file stands where a directory is needed", "remove that file or choose another path"),
    errno.ENOTDIR: ("a file stands where a directory is needed", "remove that file or choose another path"),
    errno.EISDIR: ("a directory stands where a file is needed", "remove that directory or choose another path"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter path"),
    errno.ENOENT: ("no such file or directory", "check the path"),
    errno.EMFILE: ("too many open files", "raise the limit with `ulimit -n`"),
    errno.EFBIG: ("the file grew past the largest size allowed", "raise the limit with `ulimit -f`"),
}


def refusal(error: OSError, path: str | Path) -> UserError | OSError:
    """The UserError that explains `error`, or `error` itself where a user can do nothing about it."""
    if error.errno not in _REFUSALS:
        return error
    what, fix = _REFUSALS[error.errno]
    return UserError(what, where=str(path), fix=fix)


@contextmanager
def explained(path: str | Path) -> Iterator[None]:
    """Within it, an OSError that a user can fix (full disk, no permission, read-only, ...) becomes a UserError."""
    try:
        yield
    except OSError as error:
        raise refusal(error, path) from error


def fsync_directory(path: str | Path) -> None:
    """Make the names in a directory durable: a rename is not until its directory has been synced."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync directories; their renames are as durable as they get.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Make a directory durable: every file in it, then every directory, from the leaves up."""
    for directory, _, names in os.walk(path, topdown=False):
        for name in names:
            descriptor = os.open(os.path.join(directory, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_directory(directory)


class NewFile:
    """A file that is written beside its place and gets its name when it is whole: `file` is open to write bytes to.

    UserError on a full disk, missing permission or a read-only file system.
    """

    def __init__(self, path: Path):
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with explained(path):
            self.file = open(self._temporary, "wb")  # noqa: SIM115

    def write(self, data: bytes) -> None:
        with explained(self.path):
            self.file.write(data)

    def publish(self) -> None:
        """Down to the disk, then under its name; what stood there before is replaced."""
        with explained(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            os.replace(self._temporary, self.path)

    def discard(self) -> None:
        """Remove what was written."""
        with suppress(OSError):
            self.file.close()
        with suppress(OSError):
            self._temporary.unlink(missing_ok=True)


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Replace the file `path` by `data` (text as UTF-8): after a crash at any moment it holds the old or the new, whole.

    Makes missing parent directories. UserError as `NewFile`; the file is then what it was.
    """
    path = Path(path)
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = NewFile(path)
        try:
            new.write(data.encode() if isinstance(data, str) else data)
            new.publish()
        except BaseException:
            new.discard()
            raise
        fsync_directory(path.parent)


def sha256(path: str | Path) -> str:
    """SHA-256 of a file, in hex; the file is read in blocks. UserError where it cannot be read."""
    with explained(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(temporary: str | Path, final: str | Path) -> None:
    """Give a finished file or directory its final name: synced first, then one rename, then the parent synced.

    Both must be on one file system. UserError if `final` exists as a directory that is not empty, or cannot be written.
    """
    temporary, final = Path(temporary), Path(final)
    with explained(final):
        if temporary.is_dir():
            fsync_tree(temporary)
        else:
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(temporary, final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise UserError(
                    "it is there already, and nothing is overwritten", str(final), "remove it or choose another path"
                ) from error
            raise
        fsync_directory(final.parent)


def finite(value: Any) -> Any:
    """JSON's own types: tensors and NumPy scalars to numbers, and NaN and infinities, which JSON has not, to null."""
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Any, indent: int | None = None) -> str:
    """`value` as JSON that every program reads, one line break at its end."""
    return json.dumps(finite(value), indent=indent, allow_nan=False) + "\n"


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object of a file; None if there is none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def existing(path: str | Path) -> Path:
    """`path`, or the nearest directory above it that is there."""
    path = Path(path).absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def free_bytes(path: str | Path) -> int:
    """Free bytes on the file system that `path` is or would be on."""
    return shutil.disk_usage(existing(path)).free
