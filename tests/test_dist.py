import os
import signal

import pytest
import torch

from pkm import dist
from pkm.dist import StopFlag
from pkm.errors import UserError


@pytest.fixture
def flag():
    flag = StopFlag().install()
    yield flag
    flag.restore()


def test_alone_every_collective_is_a_no_op():
    assert (dist.rank(), dist.world_size(), dist.local_rank(), dist.is_main()) == (0, 1, 0, True)
    tensor, thing = torch.ones(2), object()
    assert dist.all_reduce(tensor) is tensor and torch.equal(tensor, torch.ones(2))
    assert dist.broadcast_object(thing) is thing
    dist.barrier()
    dist.start(torch.device("cpu"))
    dist.stop()


def test_alone_an_error_of_the_main_rank_is_raised_as_it_is():
    error = UserError("wrong", "here", "repair it")
    with pytest.raises(UserError) as caught, dist.together():
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


def test_restore_puts_the_handlers_back():
    before = {number: signal.getsignal(number) for number in StopFlag.SIGNALS}
    StopFlag().install().restore()
    assert before == {number: signal.getsignal(number) for number in StopFlag.SIGNALS}


def _each_rank(rank, size, rendezvous, outcomes):
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    tensor = dist.all_reduce(torch.tensor([1.0, rank]))
    flag = StopFlag()
    before = flag.requested(outcomes)
    if rank == 1:
        flag.reason = "SIGUSR1"
    after = flag.requested(outcomes)
    try:
        with dist.together():
            if dist.is_main():
                raise UserError("wrong", "here", "repair it")
        error = None
    except UserError as caught:
        error = str(caught)
    dist.barrier()
    (outcomes / str(rank)).write_text(repr((tensor.tolist(), before, after, dist.broadcast_object(rank), error)))
    dist.stop()


def test_all_ranks_agree(tmp_path):
    context = torch.multiprocessing.get_context("fork")
    arguments = (2, tmp_path / "rendezvous", tmp_path)
    ranks = [context.Process(target=_each_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    outcomes = [eval((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert outcomes[0] == outcomes[1] == ([2.0, 1.0], None, "SIGUSR1", 0, "here: wrong\n  fix: repair it")
