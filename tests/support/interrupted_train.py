"""train.py, but the program that started it gets a SIGTERM once the sixth step is written, and passes it on before the seventh."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pkm.run.metrics import Metrics

write = Metrics.write


def write_and_signal(self: Metrics, step: int, kind: Any, **values: Any) -> None:
    write(self, step, kind, **values)
    if (step, kind) == (6, "train"):
        arrived, arrive = os.pipe()
        obey: Any = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *given: (obey(*given), os.write(arrive, b".")))
        os.kill(os.getppid(), signal.SIGTERM)
        os.read(arrived, 1)


if __name__ == "__main__":
    import train

    Metrics.write = write_and_signal  # type: ignore[method-assign]
    raise SystemExit(train.main())
