import threading

import numpy as np
import pytest
import torch

from pkm.train.prefetch import Prefetcher

CPU = torch.device("cpu")


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.full((2, 5), step, np.int64)
    return tokens[:, :-1], tokens[:, 1:]


def test_the_next_batch_is_read_while_the_last_one_is_in_use():
    read = threading.Event()

    def reads(step: int) -> tuple[np.ndarray, np.ndarray]:
        if step == 2:
            read.set()
        return batch(step)

    with Prefetcher(reads, CPU) as ahead:
        inputs, targets = ahead.take(1)
        assert read.wait(60)  # without having been asked for
    assert (
        torch.equal(inputs, torch.ones(2, 4, dtype=torch.int64)) and inputs.is_contiguous() and targets.is_contiguous()
    )


def test_any_step_may_be_asked_for_and_again():
    with Prefetcher(batch, CPU) as ahead:
        assert [int(ahead.take(step)[0][0, 0]) for step in (7, 7, 8, 3, 4)] == [7, 7, 8, 3, 4]


def test_what_reading_raises_is_raised_where_the_batch_is_taken():
    def reads(step: int) -> tuple[np.ndarray, np.ndarray]:
        if step == 2:
            raise OSError("the disk is gone")
        return batch(step)

    with Prefetcher(reads, CPU) as ahead:
        ahead.take(1)
        with pytest.raises(OSError, match="gone"):
            ahead.take(2)
