import importlib.util
from pathlib import Path

import pytest

from tests.support.interpreted import passes_in_tritons_interpreter


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_training_waits_for_no_gpu() -> None:
    passes_in_tritons_interpreter(Path(__file__).with_name("no_wait_cases.py"))
