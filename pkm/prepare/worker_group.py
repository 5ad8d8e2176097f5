"""The process that several workers of this machine are children of: `python -m pkm.prepare.worker_group EXECUTOR PARENT`.

It leads a process group, ends it whole when the process that started it is gone, and is ended whole by it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

POLL_SECONDS = 0.5


def main() -> None:
    path, parent = sys.argv[1], int(sys.argv[2])
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    import dill

    with open(path, "rb") as file:
        executor = dill.load(file)
    executor.run()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
