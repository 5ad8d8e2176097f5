"""The examples run as they stand, and what they train learns."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["gpt", "hugging_face"])
def test_it_trains_a_model_with_a_memory(name):
    if name == "hugging_face" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, f"examples/{name}.py", "40"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 3 and losses[0] > 5 and losses[-1] < 4  # a uniform guess costs 5.55
    if name == "hugging_face":
        assert done.stdout.splitlines()[3].startswith("def ")
