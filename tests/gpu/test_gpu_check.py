"""`scripts/gpu_check.sh` around its stages, with a stand-in for the Python of a machine that has a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Has every package, and a GPU; its test run and its benchmark of models go well, its benchmark of layers does not.
STAND_IN = """#!/bin/sh
case "$*" in
-c*|-) exit 0 ;;
"-m pytest"*) for a in "$@"; do case $a in --junitxml=*) f=${a#*=} ;; esac; done
  echo '<testsuites><testsuite tests="5" failures="0" errors="0" skipped="1"/></testsuites>' >"$f"; exit CASES ;;
*memory_layer*) echo "it broke"; exit 3 ;;
*model.py*) echo "| models |"; exit 0 ;;
*) exec PYTHON "$@" ;;
esac
"""


def check(folder: Path, cases: int = 0) -> subprocess.CompletedProcess[str]:
    python = folder / "python"
    python.write_text(STAND_IN.replace("PYTHON", sys.executable).replace("CASES", str(cases)))
    python.chmod(0o755)
    command = ["bash", str(ROOT / "scripts/gpu_check.sh"), str(folder)]
    return subprocess.run(
        command, env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True, check=False
    )


def test_a_stage_that_fails_is_named_and_the_others_run_and_the_table_comes_last(tmp_path):
    done = check(tmp_path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    failed = next(i for i, line in enumerate(lines) if line.startswith("FAILED"))
    assert "exit code 3" in lines[failed] and "memory_layer.py" in lines[failed]
    assert lines.index("| models |") > failed
    assert "| kernels against reference and float64 | 4 passed, 0 failed, 1 skipped | all pass | yes |" in lines
    assert lines[-1].startswith("| 12 layers")


def test_kernels_whose_tests_were_not_all_run_have_not_passed(tmp_path):
    assert "| 4 passed, 0 failed, 1 skipped, not all run or passed | all pass | NO |" in check(tmp_path, cases=2).stdout


def test_numbers_of_an_earlier_run_are_not_taken_for_this_ones(tmp_path):
    row = {"slots": 512**2, "what": "ours, fused, bf16 state: forward", "ms": 0.5}
    (tmp_path / "memory.json").write_text(json.dumps({"facts": {"machine": "old"}, "rows": [row]}))
    assert "| 512^2 slots, ours, fused, bf16 state: forward | missing | <= 1.2 ms | NO |" in check(tmp_path).stdout


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has a GPU")
def test_without_a_gpu_the_check_says_what_it_needs(tmp_path):
    command = ["bash", str(ROOT / "scripts/gpu_check.sh"), str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "no CUDA device" in done.stderr and "fix:" in done.stderr
