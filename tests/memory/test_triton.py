import importlib.util
from pathlib import Path

import pytest

from tests.support.interpreted import passes_in_tritons_interpreter


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("what", ["search", "read", "update", "layer"])
def test_the_triton_kernels_are_right_in_tritons_interpreter(what: str) -> None:
    passes_in_tritons_interpreter(Path(__file__).with_name(f"triton_{what}_cases.py"))
