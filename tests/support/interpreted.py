"""Tests of Triton kernels in Triton's interpreter, which needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def passes_in_tritons_interpreter(cases: Path) -> None:
    """Fails with what pytest says of `cases`, run in a process of its own: Triton decides when it is imported whether it interprets.

    Hides a GPU from them.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", str(cases), "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
