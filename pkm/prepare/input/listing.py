"""Files behind a path: a file, a folder (with all folders in it) or a glob. Nothing is passed over without a word.

On this machine links are followed, as in the cache of a data hub, where every file is one; elsewhere fsspec lists.
"""

from __future__ import annotations

import fnmatch
import heapq
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from pkm.errors import UserError
from pkm.files import refusal
from pkm.format import printable

HIDDEN = "hidden (names that begin with . or _)"
LOOP, BROKEN, NO_FILE = "links to a folder around them", "links to nothing", "neither file nor folder"
NAMED_TWICE = "further names of files that are read"


@dataclass(frozen=True)
class Found:
    """One file. real: where it lies, links followed; other names of the same file have the same."""

    name: str
    size: int
    stamp: str
    real: str


@dataclass
class LeftOut:
    """What was passed over: by name, the reason; for a file of no known kind that is its ending."""

    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        self.reasons[name] = reason

    def counts(self) -> dict[str, int]:
        """How many by reason, the most frequent first, hidden ones last."""
        found = Counter(self.reasons.values())
        return dict(sorted(found.items(), key=lambda item: (item[0] == HIDDEN, -item[1], item[0])))

    def line(self) -> str:
        """One line for people; "" if there is nothing to say."""
        counts = self.counts()
        most = next(iter(counts), "")
        return left_out_line(counts, min((name for name, reason in self.reasons.items() if reason == most), default=""))


def left_out_line(counts: dict[str, int], example: str = "") -> str:
    """What was passed over, in words."""
    if not counts:
        return ""
    kinds = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
    return f"left out: {kinds}" + (f" (for example {printable(example)})" if example else "")


def files_at(fs: Any, inner: str, local: bool, left_out: LeftOut) -> list[Found]:
    """The files of a path by name, each name once. OSError where one cannot be read; FileNotFoundError for nothing there."""
    pattern = _magic(inner) and not fs.exists(inner)
    if local:
        found = _matches("/", inner.strip("/").split("/"), left_out) if pattern else _local(inner, left_out)
    else:
        found = _remote(fs, inner, pattern, left_out)
    return sorted({file.name: file for file in found}.values(), key=lambda file: file.name)


def _local(path: str, left_out: LeftOut) -> Iterator[Found]:
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        for folder, real, names in _folders(path, left_out):
            yield from _files(folder, real, names, left_out)
    elif stat.S_ISREG(status.st_mode):
        yield _found(path, status, os.path.realpath(path))
    else:
        raise UserError("it is neither a file nor a folder", path, "write what it gives to a file, and name that")


def _folders(root: str, left_out: LeftOut) -> Iterator[tuple[str, str, list[str]]]:
    """(folder, where it lies, names in it) of a folder and all in it, each once: by its own name before a link's."""
    waiting: list[tuple[bool, str, str]] = [(False, root, os.path.realpath(root))]
    visited = set()
    while waiting:
        _, folder, real = heapq.heappop(waiting)
        if real in visited:
            continue
        visited.add(real)
        names = []
        for entry in sorted(_seen(folder, left_out), key=lambda entry: entry.name):
            names.append(entry.name)
            if not _is_folder(entry.path):
                continue
            names.pop()
            inside = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(real, entry.name)
            if entry.is_symlink() and f"{real}/".startswith(inside.rstrip("/") + "/"):
                left_out.add(LOOP, entry.path)
            else:
                heapq.heappush(waiting, (entry.is_symlink(), entry.path, inside))
        yield folder, real, names


def _seen(folder: str, left_out: LeftOut) -> Iterator[os.DirEntry[str]]:
    """Entries of a folder but hidden ones: files like _SUCCESS and .part are the marks of other programs."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name[0] in "._":
                left_out.add(HIDDEN, entry.path)
            else:
                yield entry


def _files(folder: str, real: str, names: Iterable[str], left_out: LeftOut) -> Iterator[Found]:
    for name in names:
        path = os.path.join(folder, name)
        status = _status(path)
        if status is None:
            left_out.add(BROKEN, path)
        elif not stat.S_ISREG(status.st_mode):
            left_out.add(NO_FILE, path)
        else:
            yield _found(path, status, os.path.realpath(path) if os.path.islink(path) else os.path.join(real, name))


def _matches(folder: str, parts: list[str], left_out: LeftOut) -> Iterator[Found]:
    """What a glob's parts match from a folder on; `**` stands for any folders. A folder that is matched is read whole."""
    part, rest = parts[0], parts[1:]
    path = os.path.join(folder, part)
    if part == "**":
        if not rest:
            yield from _local(folder, left_out)
            return
        passed = LeftOut()
        for inside, _, _ in _folders(folder, passed):
            yield from _matches(inside, rest, left_out)
        # Hidden files that the rest of the glob would not have matched are no news.
        left_out.reasons.update((name, reason) for name, reason in passed.reasons.items() if _is_folder(name))
        return
    if not _magic(part) or ("*" not in part and os.path.lexists(path)):
        names = [part] if os.path.lexists(path) else []
    else:
        names = sorted(name for name in os.listdir(folder) if fnmatch.fnmatchcase(name, part))
        if part[0] not in "._":
            for name in names:
                if name[0] in "._":
                    left_out.add(HIDDEN, os.path.join(folder, name))
            names = [name for name in names if name[0] not in "._"]
    folders = [name for name in names if _is_folder(os.path.join(folder, name))]
    for name in folders:
        inside = os.path.join(folder, name)
        yield from _matches(inside, rest, left_out) if rest else _local(inside, left_out)
    if not rest:
        others = sorted(set(names) - set(folders))
        yield from _files(folder, os.path.realpath(folder), others, left_out)


def _remote(fs: Any, inner: str, pattern: bool, left_out: LeftOut) -> Iterator[Found]:
    if pattern:
        whole = PurePosixPath(inner).name[:1] not in "._"
        entries = []
        for entry in fs.glob(inner, detail=True).values():
            hidden = whole and PurePosixPath(entry["name"]).name[:1] in "._"
            if hidden:
                left_out.add(HIDDEN, entry["name"])
            elif entry["type"] == "directory" and not inner.endswith("**"):
                entries += [e for e in fs.find(entry["name"], detail=True).values() if not _hidden(e, entry["name"])]
            elif entry["type"] == "file":
                entries.append(entry)
    elif fs.isdir(inner):
        entries = []
        for entry in fs.find(inner, detail=True).values():
            if _hidden(entry, inner):
                left_out.add(HIDDEN, entry["name"])
            else:
                entries.append(entry)
    else:
        entries = [fs.info(inner)]
    for entry in entries:
        stamp = str(entry.get("mtime") or entry.get("LastModified") or entry.get("ETag") or "")
        yield Found(entry["name"], int(entry.get("size") or 0), stamp, fs.unstrip_protocol(entry["name"]))


def _hidden(entry: dict[str, Any], folder: str) -> bool:
    return any(part[:1] in "._" for part in PurePosixPath(entry["name"][len(folder) :].lstrip("/")).parts)


def _found(path: str, status: os.stat_result, real: str) -> Found:
    return Found(path, status.st_size, str(status.st_mtime), real)


def _magic(path: str) -> bool:
    return any(character in path for character in "*?[")


def _status(path: str) -> os.stat_result | None:
    """None for a link that leads to nothing."""
    try:
        return os.stat(path)
    except OSError as error:
        if os.path.islink(path) and not isinstance(error, PermissionError):
            return None
        raise refusal(error, path) from error


def _is_folder(path: str) -> bool:
    status = _status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)
