"""Named points at which a test can kill the process, to test that a save may be killed at any moment."""

from __future__ import annotations

import os
import signal
from collections import Counter

_passed: Counter[str] = Counter()


def point(name: str) -> None:
    """Die by SIGKILL here if the environment says PKM_FAULT=`name`, or `name`#3 for the third pass of this point."""
    wanted = os.environ.get("PKM_FAULT")
    if wanted is None:
        return
    _passed[name] += 1
    if wanted in (f"{name}#{_passed[name]}", name):
        os.kill(os.getpid(), signal.SIGKILL)
