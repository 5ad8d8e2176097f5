"""Python's garbage collector while a run trains.

It looks at objects whenever enough were made, which is at any moment of any step, and on each rank at another one, while
the others wait. So what lives through the first steps is left out of its sight, and it runs at intervals, on all ranks alike.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SETTLED = 3
"""Steps after which what a run keeps is there."""
EVERY_STEPS = 1000


@contextmanager
def collected_at_intervals() -> Iterator[Callable[[int], None]]:
    """Gives what is to be called after each step with its number; afterwards the collector is as it was.

    Where the caller has frozen objects already, nothing is frozen here: it could not be told from theirs afterwards.
    """
    was_enabled, freezes, taken = gc.isenabled(), gc.get_freeze_count() == 0, 0

    def collect(step: int) -> None:
        nonlocal taken
        taken += 1
        if taken == SETTLED:
            gc.collect()
            if freezes:
                gc.freeze()
            gc.disable()
        elif taken > SETTLED and step % EVERY_STEPS == 0:
            gc.collect()

    try:
        yield collect
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
