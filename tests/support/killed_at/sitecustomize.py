"""Kills a program at its KILL_AT-th change below the folder CHANGES_BELOW, counted over all processes of its group.

Python imports a module of this name when it starts, so with this folder on PYTHONPATH the program's workers count too. The file
CHANGES holds a byte for each. With KILL_ONLY_FIRST the process that leads the group is killed, and the others are left to notice.
"""

import fcntl
import os
import signal
import sys
from typing import Any

CHANGES, BELOW = os.environ["CHANGES"], os.path.join(os.environ["CHANGES_BELOW"], "")
AT, FIRST = int(os.environ.get("KILL_AT", 0)), "KILL_ONLY_FIRST" in os.environ


def changes(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether this is about to change what is in the folder."""
    if event == "open":
        path, _, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    else:
        path, writes = arguments[0], event in ("os.mkdir", "os.remove", "os.rename", "os.rmdir")
    return bool(writes) and not isinstance(path, int) and os.path.abspath(os.fsdecode(path)).startswith(BELOW)


def look(event: str, arguments: tuple[Any, ...]) -> None:
    if (event != "open" and not event.startswith("os.")) or not changes(event, arguments):
        return
    descriptor = os.open(CHANGES, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, b".")
    number = os.fstat(descriptor).st_size
    os.close(descriptor)
    if number == AT:
        (os.kill if FIRST else os.killpg)(os.getpgrp(), signal.SIGKILL)


sys.addaudithook(look)
