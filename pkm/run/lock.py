"""The lock of a run directory: one process holds it at a time, and the lock of a dead process is taken over.

The lock proper is flock on the file `lock`, which the system drops when its holder dies. Some network file systems keep
flock to one machine or have none, so the file also says who holds it, and the holder touches it every few seconds: a
holder on another machine counts as dead only when the file was not touched while we watched. No clocks are compared.

Where flock does not exclude, two that start together may both find the file empty and both write it: it is the last one's.
The other finds a token in it that is not its own, before it begins or, at the latest, when it would touch the file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pkm import files
from pkm.errors import UserError
from pkm.machine import lives

BEAT_SECONDS = 10
WATCH_SECONDS = 45
SETTLE_SECONDS = 2
RECORD_BYTES = 512  # of one length, so that two that are written at once do not mix
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class Lock:
    """Holds `path` from `acquire` to `release`.

    lost    called in a thread, with who it is, if another process took the lock over meanwhile
    token   names this holder in the file; the other ranks of a run are given that of rank 0
    """

    def __init__(
        self, path: Path, lost: Callable[[str], object] = lambda by: None, wait: Callable[[float], None] = time.sleep
    ):
        self.path, self._lost, self._wait = path, lost, wait
        self._file: int | None = None
        self.token = ""
        self._released = threading.Event()

    def acquire(self, say: Callable[[str], None]) -> None:
        """Take the lock; `say` hears that a dead holder's was taken over. UserError if a living process has it."""
        with files.explained(self.path):
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            works = _flock(file)
            holder = self._holder()
            if works is False or (holder and self._lives(holder, works, say)):
                raise self._refusal(holder)
            with files.explained(self.path):
                self._write(file)
            if works is None:
                self._wait(SETTLE_SECONDS)  # whoever found the file empty as well has written by now
                if not self.mine():
                    raise self._refusal(self._holder())
        except BaseException:
            os.close(file)
            raise
        if holder:
            say(f"took over from {_described(holder)}, which ended without releasing the run")
        self._file = file
        self._released.clear()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the lock back; nothing to do if it is not held."""
        if self._file is None:
            return
        self._released.set()
        if self.mine():
            os.ftruncate(self._file, 0)
        os.close(self._file)
        self._file = None

    def mine(self) -> bool:
        """Whether the file still says what this lock wrote."""
        try:
            return self._holder().get("token") == self.token
        except OSError:
            return False

    def taken_over_by(self) -> str | None:
        """Who holds the lock in place of this one; None as long as nobody does."""
        holder = {}
        with suppress(OSError):  # a network file system that does not answer says nothing of others
            holder = self._holder()
        # An empty file may be about to be written.
        return _described(holder) if self.token and holder and holder.get("token") != self.token else None

    def _write(self, file: int) -> None:
        self.token = uuid.uuid4().hex
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "token": self.token}
        os.pwrite(file, json.dumps(me).encode().ljust(RECORD_BYTES), 0)
        os.ftruncate(file, RECORD_BYTES)
        os.fsync(file)

    def _refusal(self, holder: dict[str, Any]) -> UserError:
        what = f"another process is at work on this run: {_described(holder)}"
        return UserError(what, str(self.path.parent), "wait for it or stop it, or give this run another name")

    def _holder(self) -> dict[str, Any]:
        """Who says to hold the lock; empty if nobody does."""
        with suppress(ValueError):
            if isinstance(holder := json.loads(self.path.read_bytes()), dict):
                return holder
        return {}

    def _lives(self, holder: dict[str, Any], flock_works: bool | None, say: Callable[[str], None]) -> bool:
        """Whether a holder whose flock does not stop us may still be at work."""
        if holder.get("host") == socket.gethostname():
            pid = holder.get("pid")
            return flock_works is None and isinstance(pid, int) and pid != os.getpid() and lives(pid)
        say(f"the run is marked as held by {_described(holder)}: watching {WATCH_SECONDS} s whether it lives")
        before = self._touched()
        for _ in range(WATCH_SECONDS):
            self._wait(1)
            if self._touched() != before:
                return True
        return False

    def _touched(self) -> int:
        # Opened each time, because that makes a network file system ask its server instead of its cache.
        with self.path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            if (by := self.taken_over_by()) is not None:
                if not self._released.is_set():  # then it is the next one's by right
                    self._lost(by)
                return
            with suppress(OSError):
                os.utime(self.path)


def lock_holder(path: Path) -> str | None:
    """Which living process holds a lock; None if none does.

    A holder on another machine counts as living as long as it touches its lock.
    """
    holder = files.read_json(path) or {}
    if not isinstance(holder.get("pid"), int):
        return None
    if holder.get("host") == socket.gethostname():
        alive = lives(holder["pid"]) and not _free(path)
    else:
        alive = path.exists() and time.time() - path.stat().st_mtime < WATCH_SECONDS
    return f"process {holder['pid']} on {holder.get('host')}" if alive else None


def _free(path: Path) -> bool:
    """Whether nobody on this machine has the flock: the number of a dead holder may be another process' now."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return _flock(file) is True
    finally:
        os.close(file)


def _flock(file: int) -> bool | None:
    """Whether flock was got; None where the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return None
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _described(holder: dict[str, Any]) -> str:
    if not holder:
        return "it did not say which"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"
