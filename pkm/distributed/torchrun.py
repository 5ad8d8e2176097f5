"""How torchrun is started on one node, how long ago it began, and how it is ended."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import psutil


def seconds_since_torchrun() -> float:
    """Seconds since torchrun began, restarts of its ranks included; 0 without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0.0
    with suppress(psutil.Error):
        return time.time() - psutil.Process(os.getppid()).create_time()
    return 0.0


ONE_NODE = ("--standalone", "--local-addr=127.0.0.1")
"""Options of torchrun. Without --local-addr it uses the machine's own name, and hangs where that does not resolve."""


def kill_all(pid: int) -> None:
    """Kill a process and all that it started. Killing its group is not enough: torchrun's ranks have sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        for process in (*first.children(recursive=True), first):
            with suppress(psutil.NoSuchProcess):
                process.kill()
