import os
import time

import pytest
import torch

from pkm.distributed import dist
from pkm.distributed.torchrun import seconds_since_torchrun
from pkm.errors import ReportedByOtherRank, UserError
from tests.support.fork import on_ranks

IMPORTED = time.perf_counter()


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


def _agree(rank):
    tensor = dist.all_reduce(torch.tensor([1.0, rank]))
    return tensor.tolist(), dist.broadcast_object(rank), dist.gather_objects(rank)


def test_all_ranks_agree():
    assert on_ranks(2, _agree) == [([2.0, 1.0], 0, [0, 1])] * 2


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


def test_the_age_of_torchrun_is_that_of_the_process_that_started_this_one(monkeypatch):
    assert seconds_since_torchrun() == 0
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(os, "getppid", os.getpid)
    youngest = time.perf_counter() - IMPORTED
    first, second = seconds_since_torchrun(), seconds_since_torchrun()
    assert youngest < first <= second < time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(os, "getppid", lambda: 2**30)  # there is none
    assert seconds_since_torchrun() == 0
