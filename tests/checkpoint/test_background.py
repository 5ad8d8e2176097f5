import threading

import pytest
import torch

from pkm.checkpoint import tensor_file
from pkm.checkpoint.background import Background, Copies
from pkm.checkpoint.checkpoints import Checkpoints
from pkm.errors import UserError


def test_an_error_is_kept_for_who_waits():
    def fail():
        raise UserError("the disk is full")

    work = Background(fail)
    with pytest.raises(UserError, match="the disk is full"):
        work.wait()
    assert work.done() and work.failed()
    work = Background(lambda: None)
    work.wait()
    assert work.done() and not work.failed()


def test_copies_stay_what_the_tensors_were():
    copies, tensor = Copies(), torch.arange(4.0).reshape(2, 2)
    taken = copies.take({"a": tensor.t(), "b": tensor[1]})
    tensor.zero_()
    assert taken["a"].tolist() == [[0, 2], [1, 3]] and taken["b"].tolist() == [2, 3]
    again = copies.take({"a": tensor.t()})
    assert again["a"].data_ptr() == taken["a"].data_ptr() and not again["a"].any()


@pytest.fixture
def held_up(monkeypatch):
    """Writing waits for `.set()`."""
    go, write = threading.Event(), tensor_file.write

    def wait_and_write(path, tensors):
        go.wait()
        return write(path, tensors)

    monkeypatch.setattr(tensor_file, "write", wait_and_write)
    yield go
    go.set()


def test_a_save_in_the_background_holds_the_tensors_of_its_step_while_training_goes_on(tmp_path, held_up):
    checkpoints = Checkpoints(tmp_path, 2, in_background=True)
    tensor = torch.ones(3)
    checkpoints.save(1, {"a": tensor}, {"step": 1})
    assert checkpoints.saving() and checkpoints.steps() == []
    tensor.zero_()
    held_up.set()
    checkpoints.save(2, {"a": tensor}, {"step": 2})  # waits for the first: one at a time
    assert checkpoints.steps()[0] == 1
    checkpoints.wait()
    assert not checkpoints.saving() and not checkpoints.failed()
    assert checkpoints.load(1).tensors["a"].tolist() == [1, 1, 1] and checkpoints.load(1).record == {"step": 1}
    assert checkpoints.load(2).tensors["a"].tolist() == [0, 0, 0]
    assert checkpoints.longest_seconds > 0


def test_a_load_waits_for_the_save_that_is_going_on(tmp_path, held_up):
    checkpoints = Checkpoints(tmp_path, 2, in_background=True)
    checkpoints.save(1, {"a": torch.ones(3)}, {})
    held_up.set()
    assert checkpoints.load("latest").step == 1


@pytest.mark.parametrize("then", ["wait", "save"])
def test_a_save_that_failed_in_the_background_says_so_at_the_next_occasion(tmp_path, then):
    root = tmp_path / "file"
    root.write_text("")
    checkpoints = Checkpoints(root, 1, in_background=True)
    checkpoints.save(1, {"a": torch.ones(3)}, {})
    with pytest.raises(UserError, match="cannot save the checkpoint of step 1: a file stands where"):
        checkpoints.wait() if then == "wait" else checkpoints.save(2, {"a": torch.ones(3)}, {})
    assert not checkpoints.failed()
    checkpoints.wait()
