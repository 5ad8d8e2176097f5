import json
import math
import os

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pkm.errors import UserError
from pkm.run.metrics import Metrics, read
from tests.support.fork import error_of, small_disk, without_root


def written(directory, steps, tensorboard=False):
    metrics = Metrics(directory, tensorboard)
    for step in steps:
        metrics.write(step, "train", loss=step / 8, memories={"6": {"usage": 50.0}})
    return metrics


def records(directory):
    return [(r["step"], r["loss"]) for r in read(directory / "metrics.jsonl")]


def curve(directory, tag):
    events = EventAccumulator(str(directory / "tensorboard"), purge_orphaned_data=False)
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_a_record_says_kind_step_time_and_the_values(tmp_path):
    metrics = Metrics(tmp_path, tensorboard=False)
    metrics.write(3, "valid", loss=1.5, tensor=torch.tensor(2.0), numpy=np.float32(0.5), list=[1, "a"], none=None)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record.pop("time") > 1.6e9
    assert record == {
        "kind": "valid",
        "step": 3,
        "loss": 1.5,
        "tensor": 2.0,
        "numpy": 0.5,
        "list": [1, "a"],
        "none": None,
    }


def test_each_record_can_be_read_at_once(tmp_path):
    metrics = written(tmp_path, [1])
    assert records(tmp_path) == [(1, 0.125)]
    metrics.write(2, "train", loss=0.25)
    assert records(tmp_path) == [(1, 0.125), (2, 0.25)]


@pytest.mark.parametrize("number", [math.nan, math.inf, torch.tensor(math.nan)])
def test_a_number_that_is_not_finite_is_null_so_that_every_line_is_json(tmp_path, number):
    Metrics(tmp_path, tensorboard=True).write(1, "train", loss=number, fine=1.0)
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)["loss"] is None


def test_a_cut_drops_what_the_checkpoint_had_not_seen(tmp_path):
    metrics = written(tmp_path, [1, 2, 3, 4])
    metrics.cut(2)
    assert records(tmp_path) == [(1, 0.125), (2, 0.25)]
    metrics.write(3, "train", loss=9.0)
    assert records(tmp_path) == [(1, 0.125), (2, 0.25), (3, 9.0)]


@pytest.mark.parametrize(
    "half", ['{"kind": "train", "step": 2, "lo', '{"kind": "train", "step": 2}', "\0\0\0\n", "7\n"]
)
def test_a_cut_drops_lines_that_are_no_whole_records(tmp_path, half):
    written(tmp_path, [1]).close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(half)
    metrics = Metrics(tmp_path, tensorboard=False)
    metrics.cut(5)
    metrics.write(2, "train", loss=0.25)
    assert records(tmp_path) == [(1, 0.125), (2, 0.25)]


def test_a_cut_at_the_last_step_drops_its_test_record_which_will_be_measured_again(tmp_path):
    metrics = written(tmp_path, [1, 2])
    metrics.write(2, "test", loss=7.0)
    metrics.cut(2)
    assert records(tmp_path) == [(1, 0.125), (2, 0.25)]
    metrics.write(2, "test", loss=7.0)
    metrics.cut(3)
    assert records(tmp_path) == [(1, 0.125), (2, 0.25), (2, 7.0)]


def test_a_cut_that_drops_nothing_leaves_the_file_alone(tmp_path):
    metrics = written(tmp_path, [1, 2])
    before = (tmp_path / "metrics.jsonl").stat()
    metrics.cut(2)
    after = (tmp_path / "metrics.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_run_without_records_can_be_cut(tmp_path):
    Metrics(tmp_path, tensorboard=True).cut(0)
    assert not list(tmp_path.iterdir())


def test_tensorboard_shows_the_records(tmp_path):
    written(tmp_path, [1, 2, 3], tensorboard=True)
    assert curve(tmp_path, "train/loss") == [(1, 0.125), (2, 0.25), (3, 0.375)]
    assert curve(tmp_path, "train/memories/6/usage") == [(1, 50.0), (2, 50.0), (3, 50.0)]


def test_tensorboard_shows_what_the_model_wrote(tmp_path):
    metrics = Metrics(tmp_path, tensorboard=True)
    metrics.write(5, "valid", loss=1.0, sample={"prompt": "The cat", "text": " sat"})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    (shown,) = events.Tensors("valid/sample")
    assert shown.step == 5 and shown.tensor_proto.string_val == [b"The cat ** sat**"]


def test_curves_of_a_resumed_run_never_overlap_even_if_the_event_file_was_cut_off(tmp_path):
    written(tmp_path, [1, 2, 3, 4], tensorboard=True)
    (events,) = (tmp_path / "tensorboard").iterdir()
    os.truncate(events, events.stat().st_size - 5)
    metrics = Metrics(tmp_path, tensorboard=True)
    metrics.cut(2)
    assert curve(tmp_path, "train/loss") == [(1, 0.125), (2, 0.25)]
    metrics.write(3, "train", loss=9.0)
    assert curve(tmp_path, "train/loss") == [(1, 0.125), (2, 0.25), (3, 9.0)]


def test_curves_are_complete_when_tensorboard_is_switched_on_later(tmp_path):
    written(tmp_path, [1, 2]).close()
    Metrics(tmp_path, tensorboard=True).cut(2)
    assert curve(tmp_path, "train/loss") == [(1, 0.125), (2, 0.25)]


def test_a_full_disk_is_named(tmp_path):
    with small_disk(tmp_path / "disk", 64) as disk, pytest.raises(UserError, match=r"metrics.jsonl: the disk is full"):
        written(disk, range(100_000))


def test_a_directory_without_permission_is_named(tmp_path):
    os.chmod(tmp_path, 0o555)
    error = error_of(lambda: written(tmp_path, [1]), UserError, before=without_root)
    os.chmod(tmp_path, 0o777)
    assert "metrics.jsonl: no permission" in error


def test_records_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics.jsonl: a directory stands where a file is needed"):
        records(tmp_path)


def test_a_file_where_the_curves_should_be_is_named(tmp_path):
    (tmp_path / "tensorboard").touch()
    with pytest.raises(UserError, match="tensorboard: a file stands where a directory is needed"):
        written(tmp_path, [1], tensorboard=True)
