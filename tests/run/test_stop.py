"""A run stops when a signal to any rank, a file or the run itself asks it to."""

import os
import signal

import pytest

from pkm.run import stop
from pkm.run.stop import StopFlag, Stopped
from tests.support.fork import on_ranks


@pytest.fixture
def flag():
    before = {number: signal.getsignal(number) for number in StopFlag.SIGNALS}
    yield StopFlag().install()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_asks_the_run_to_stop(flag, tmp_path, name):
    assert flag.requested(tmp_path) is None
    os.kill(os.getpid(), signal.Signals[name])
    assert flag.requested(tmp_path) == name == flag.requested(tmp_path)


def test_a_storm_of_sigterm_is_one_request(flag, tmp_path):
    for _ in range(100):
        os.kill(os.getpid(), signal.SIGTERM)
    assert flag.requested(tmp_path) == "SIGTERM"


def test_a_second_ctrl_c_interrupts_at_once(flag, tmp_path):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    assert flag.requested(tmp_path) == "SIGTERM"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_file_STOP_asks_the_run_to_stop(flag, tmp_path):
    (tmp_path / "STOP").touch()
    assert flag.requested(tmp_path) == "STOP file"


def test_a_ctrl_c_that_arrives_twice_at_a_rank_of_torchrun_is_one(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    now = [5.0]
    monkeypatch.setattr(stop.time, "monotonic", lambda: now[0])
    flag = StopFlag()
    flag._handle(signal.SIGINT, None)
    now[0] += 4.9
    flag._handle(signal.SIGINT, None)
    assert flag.requested(tmp_path) == "SIGINT"
    now[0] += 0.2
    with pytest.raises(KeyboardInterrupt):
        flag._handle(signal.SIGINT, None)


def test_a_check_raises_why_the_run_has_to_stop(tmp_path):
    flag = StopFlag()
    flag.check(tmp_path)
    flag.ask("SIGTERM")
    with pytest.raises(Stopped, match="SIGTERM"):
        flag.check(tmp_path)


def _agree(rank, directory):
    flag = StopFlag()
    before = flag.requested(directory)
    if rank == 1:
        flag.ask("SIGUSR1")
    return before, flag.requested(directory)


def test_all_ranks_stop_for_the_reason_that_one_of_them_heard(tmp_path):
    assert on_ranks(2, lambda rank: _agree(rank, tmp_path)) == [(None, "SIGUSR1")] * 2
