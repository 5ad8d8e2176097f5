"""Is the directory of a run on a file system that all its ranks share, and does that one do what checkpoints rely on?

A checkpoint is published by a rename that every rank must see; every rank writes and syncs a part of its own; a run is
guarded by a lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from pkm import files
from pkm.config.schema import Config
from pkm.distributed import dist
from pkm.doctor.finding import Finding
from pkm.doctor.gather import gather_results, named

RUNS = Path("runs")
VISIBLE_SECONDS = 70.0
"""A network file system may answer from memory for a minute (acdirmax of NFS)."""
SLOW_SECONDS = 5.0
PART_BYTES = 1 << 16


def examine(config: Config | None) -> Iterator[Finding]:
    """Every check, in the nearest existing directory above where rank 0 would make the run's."""
    wanted = (config.directory if config else RUNS).absolute()
    folder = dist.broadcast_object(files.existing(wanted) / f".doctor-{uuid.uuid4().hex}")
    try:
        shared = renames(folder)
        yield shared
        if shared.status != "fail":
            yield parts(folder)
            yield locks(folder)
    finally:
        if dist.is_main():
            shutil.rmtree(folder, ignore_errors=True)


def renames(folder: Path) -> Finding:
    """Whether what rank 0 renames to a name, new or taken, is what all ranks then read."""
    name, slowest = folder / "published", 0.0
    for content in ("one", "two"):
        delays = rename(name, content)
        if isinstance(delays, Finding):
            return delays
        blind = [rank for rank, seconds in enumerate(delays) if seconds is None]
        if blind:
            unseen = f"rank {named(blind)} does not see what rank 0 wrote below {folder.parent}"
            return Finding("shared files", "fail", unseen, "put `runs` on a file system that all nodes share")
        slowest = max(slowest, *(seconds or 0.0 for seconds in delays))
    found = f"a rename by rank 0 below {folder.parent} is seen by all ranks within {slowest:.2f} s"
    if slowest > SLOW_SECONDS:
        return Finding("shared files", "note", found, "as long as that a file STOP takes to be seen")
    return Finding("shared files", "ok", found)


def rename(name: Path, content: str) -> list[float | None] | Finding:
    """Of each rank, the seconds until it reads `content` there, which rank 0 renamed; None where it did not."""
    # A rank that read the file before may get it from its cache.
    gather_results(name.exists)
    written = gather_results(lambda: files.atomic_write(name, content) if dist.is_main() else None)
    seen = gather_results(lambda: seconds_until(lambda: name.read_text() == content))
    return written.failure("shared files") or seen.failure("shared files") or seen.results


def parts(folder: Path) -> Finding:
    """Whether rank 0 finds the part of a checkpoint that each rank writes and syncs."""

    def write() -> None:
        with open(folder / f"part-{dist.rank()}", "xb") as file:
            file.write(os.urandom(PART_BYTES))
            file.flush()
            os.fsync(file.fileno())
        files.fsync_directory(folder)

    def is_whole(rank: int) -> bool:
        path = folder / f"part-{rank}"
        return path.exists() and path.stat().st_size == PART_BYTES

    def missing() -> list[int]:
        ranks = range(dist.world_size()) if dist.is_main() else ()
        seconds_until(lambda: all(map(is_whole, ranks)))
        return [rank for rank in ranks if not is_whole(rank)]

    broken = gather_results(write).failure("parts", "every rank must be able to write and sync where the run is")
    found = gather_results(missing)
    broken = broken or found.failure("parts")
    if broken:
        return broken
    if found.results[0]:
        unseen = f"rank 0 does not see what rank {named(found.results[0])} wrote"
        return Finding("parts", "fail", unseen, "put `runs` on a file system that all nodes share")
    return Finding("parts", "ok", "every rank writes and syncs a file, and rank 0 sees them all")


def locks(folder: Path) -> Finding:
    """Whether rank 0's lock keeps the others out."""
    opened: list[int] = []

    def take() -> bool | None:
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
        opened.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
        return True

    first = gather_results(lambda: take() if dist.is_main() else True)
    others = gather_results(lambda: False if dist.is_main() else take())
    for file in opened:
        os.close(file)
    broken = first.failure("locks") or others.failure("locks")
    return broken or exclusive(first.results[0], others.results)


def exclusive(first: bool | None, others: list[bool | None]) -> Finding:
    """first, others   whether rank 0, and then each rank, got the lock; None = the file system has none"""
    beat = "a run is then guarded by its holder's beat: a second one watches that for 45 s before it begins"
    if first is None or None in others:
        return Finding("locks", "note", "this file system has no flock", beat)
    doubled = [rank for rank, got in enumerate(others) if got]
    if doubled:
        return Finding("locks", "note", f"rank {named(doubled)} gets the lock that rank 0 holds", beat)
    return Finding("locks", "ok", "a lock that rank 0 holds keeps all other ranks out")


def seconds_until(true: Callable[[], bool]) -> float | None:
    """Until `true`, where files that are not there yet count as not true; None if that takes VISIBLE_SECONDS."""
    start = time.perf_counter()
    while (waited := time.perf_counter() - start) < VISIBLE_SECONDS:
        try:
            if true():
                return waited
        except FileNotFoundError:
            pass
        time.sleep(0.02)
    return None
