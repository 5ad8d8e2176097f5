import os
import signal
import time

import pytest
import torch

from pkm.distributed import dist
from pkm.distributed.torchrun import seconds_since_torchrun
from pkm.errors import ReportedByOtherRank, UserError
from pkm.run import stop
from pkm.run.stop import StopFlag, Stopped
from tests.support.fork import on_ranks

IMPORTED = time.perf_counter()


@pytest.fixture
def flag():
    before = {number: signal.getsignal(number) for number in StopFlag.SIGNALS}
    yield StopFlag().install()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_alone_every_collective_is_a_no_op():
    assert (dist.rank(), dist.world_size(), dist.is_main()) == (0, 1, True)
    tensor, thing = torch.ones(2), object()
    assert dist.all_reduce(tensor) is tensor and torch.equal(tensor, torch.ones(2))
    assert dist.broadcast_object(thing) is thing
    dist.start(torch.device("cpu"))
    dist.stop()


def test_alone_an_error_of_the_main_rank_is_raised_as_it_is():
    error = UserError("wrong", "here", "repair it")
    with pytest.raises(UserError) as caught, dist.raise_on_all_ranks():
        raise error
    assert caught.value is error


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


def _agree(rank, directory):
    tensor = dist.all_reduce(torch.tensor([1.0, rank]))
    flag = StopFlag()
    before = flag.requested(directory)
    if rank == 1:
        flag.ask("SIGUSR1")
    return tensor.tolist(), before, flag.requested(directory), dist.broadcast_object(rank), dist.gather_objects(rank)


def test_all_ranks_agree(tmp_path):
    assert on_ranks(2, lambda rank: _agree(rank, tmp_path)) == [([2.0, 1.0], None, "SIGUSR1", 0, [0, 1])] * 2


@pytest.mark.parametrize("met_by", [[0], [1], [1, 2]])
def test_an_error_of_any_rank_is_raised_on_all_and_said_on_one(met_by):
    def outcome(rank):
        try:
            with dist.raise_on_all_ranks():
                if rank in met_by:
                    raise UserError(f"wrong on {rank}", "here", "repair it")
        except UserError as error:
            return str(error), type(error)

    message = f"here: wrong on {met_by[0]}\n  fix: repair it"
    assert on_ranks(3, outcome) == [
        (message, UserError if rank == met_by[0] else ReportedByOtherRank) for rank in range(3)
    ]


def test_a_rank_that_dies_is_noticed_by_who_waits_for_it(tmp_path):
    def outcome(rank):
        if rank == 1:
            torch.distributed.barrier()
            os._exit(0)
        torch.distributed.barrier()
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            (tmp_path / "noticed").write_text(str(dist.loss_of_rank(error)))
        os._exit(0)

    with pytest.raises(FileNotFoundError):
        on_ranks(2, outcome)
    assert "onnection" in (tmp_path / "noticed").read_text()
    assert dist.loss_of_rank(RuntimeError("boom")) is dist.loss_of_rank(None) is None


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


def test_the_age_of_torchrun_is_that_of_the_process_that_started_this_one(monkeypatch):
    assert seconds_since_torchrun() == 0
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(os, "getppid", os.getpid)
    youngest = time.perf_counter() - IMPORTED
    first, second = seconds_since_torchrun(), seconds_since_torchrun()
    assert youngest < first <= second < time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(os, "getppid", lambda: 2**30)  # there is none
    assert seconds_since_torchrun() == 0


def test_a_check_raises_why_the_run_has_to_stop(tmp_path):
    flag = StopFlag()
    flag.check(tmp_path)
    flag.ask("SIGTERM")
    with pytest.raises(Stopped, match="SIGTERM"):
        flag.check(tmp_path)
