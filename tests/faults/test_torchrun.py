"""torchrun itself: what it does to its ranks when one dies, and when it is told to stop."""

import os
import re
import signal
import subprocess
import sys
import threading

import pytest

from pkm.distributed.torchrun import kill_all
from tests.support.train_server import LONGEST_SECONDS, REPOSITORY

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
TORCHRUN += ["--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1", "--monitor-interval=0.1"]


def torchrun(*arguments):
    process = subprocess.Popen(
        [*TORCHRUN, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    impatience = threading.Timer(LONGEST_SECONDS, kill_all, [process.pid])
    impatience.daemon = True
    impatience.start()
    return process


def until(process, text):
    heard = []
    for line in process.stdout:
        heard.append(line)
        if text in line:
            return
    raise AssertionError("".join(heard))


def test_a_rank_that_dies_is_restarted_with_the_others_and_the_run_ends_bit_identical(runs):
    fault = ("1", "checkpoint:in-shard#45", str(runs.settings("run")), "max_minutes=1000")
    process = torchrun("--max-restarts=1", "-m", "tests.support.dying_rank", *fault)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert "took over from process" not in output  # the rank that held the lock was not the one that died
    assert "rank 0 lost another rank" in runs.log("run")
    times = re.findall(r"(\d+):(\d\d) since torchrun began, of max_minutes = 1000", runs.log("run"))
    before, after = (60 * int(minutes) + int(seconds) for minutes, seconds in times)
    assert before < after  # the limit is not counted anew
    assert runs.status("run")[0] == "finished"
    runs.finish(2, "whole")
    assert runs.outcome("run") == runs.outcome("whole")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_torchrun_told_to_stop_lets_the_ranks_save(runs, name):
    """Ctrl-C in a terminal reaches torchrun and, from there or by themselves, the ranks: some of them twice."""
    process = torchrun("train.py", str(runs.settings("run")), "optim.steps=100000", "checkpoint.every_steps=100000")
    until(process, "step      5/100000")
    if name == "SIGINT":
        rank_0 = int(runs.holder("run")["pid"])
        os.kill(rank_0, signal.SIGINT)
    process.send_signal(signal.Signals[name])
    output = process.communicate(timeout=300)[0]
    state, step, reason = runs.status("run")
    assert (state, reason) == ("stopped", name), output
    assert runs.checkpoints("run").load("latest").step == step
