import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("triton_cases.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_kernels_are_right_in_tritons_interpreter() -> None:
    # A process of its own: Triton decides when it is imported whether it interprets, and hides the GPU from the cases.
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", str(CASES), "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, env=environment, cwd=CASES.parents[2], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
