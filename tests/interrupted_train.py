"""train.py, but the program that started it gets a SIGTERM once the sixth step is written."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pkm.metrics import Metrics

write = Metrics.write


def write_and_signal(self: Metrics, step: int, kind: Any, **values: Any) -> None:
    write(self, step, kind, **values)
    if (step, kind) == (6, "train"):
        os.kill(os.getppid(), signal.SIGTERM)


if __name__ == "__main__":
    import train

    Metrics.write = write_and_signal  # type: ignore[method-assign]
    raise SystemExit(train.main())
