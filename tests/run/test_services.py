"""W&B, which writes to the disk here instead of sending, and MLflow, with a folder as its server."""

import json
import struct
import sys
import threading

import pytest
from mlflow.tracking import MlflowClient
from wandb.proto import wandb_internal_pb2

from pkm.errors import UserError
from pkm.run import services
from pkm.run.metrics import Metrics, read
from pkm.run.services import Forwarder
from pkm.run.stop import STOP_FILE
from tests.support.tiny import tiny_config


def history(file):
    """What W&B was told, row by row. Its files are LevelDB's log format, in blocks of 32 KiB, after a header of 7 bytes."""
    data, place, parts, rows = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts = (b"" if kind in (1, 2) else parts) + data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record.FromString(parts)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_a_run_and_what_resumes_it_are_one_run_at_wandb(train):
    log = {"wandb": {"mode": "offline", "project": "p"}}
    train(optim={"steps": 10}, log=log)
    *_, directory = train(optim={"steps": 20}, log=log)
    known = json.loads((directory / "wandb.json").read_text())["id"]
    files = sorted((directory / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and {file.stem for file in files} == {f"run-{known}"}
    rows = [row for file in files for row in history(file)]
    sent = [(kind, row["step"]) for row in rows for kind in ("train", "valid") if f"{kind}/loss" in row]
    records = [r for r in read(directory / "metrics.jsonl") if r["kind"] in ("train", "valid")]
    assert sorted(sent) == sorted((r["kind"], r["step"]) for r in records)
    ours = {r["step"]: r for r in records if r["kind"] == "valid"}
    for row in rows:
        if "valid/loss" in row:
            assert row["valid/loss"] == ours[row["step"]]["loss"]
            assert row["valid/memories/2/never_read"] == ours[row["step"]]["memories"]["2"]["never_read"]
            assert ours[row["step"]]["sample"]["text"] in row["valid/sample"]


def test_a_run_and_what_resumes_it_are_one_run_at_mlflow(train, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    log = {"mlflow": {"uri": (tmp_path / "server").as_uri(), "experiment": "e"}}
    train(optim={"steps": 10}, log=log)
    *_, directory = train(optim={"steps": 20}, log=log)
    client = MlflowClient(log["mlflow"]["uri"])
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert run.info.run_id == json.loads((directory / "mlflow.json").read_text())["id"]
    assert run.info.status == "FINISHED" and run.data.params["optim.values.lr"] == "0.01"
    losses = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")]
    records = list(read(directory / "metrics.jsonl"))
    assert losses == [(r["step"], r["loss"]) for r in records if r["kind"] == "train"]
    assert [file.path for file in client.list_artifacts(run.info.run_id, "samples")] == [
        "samples/step-0000010.txt",
        "samples/step-0000020.txt",
    ]


class Fake:
    """A service that keeps what it is told, and fails or hangs where it is asked to."""

    name, where = "fake", "nowhere"

    def __init__(self, fails="", hangs=None):
        self.fails, self.hangs, self.told = fails, hangs, []

    def _do(self, what, told):
        if self.fails == what:
            raise RuntimeError("no\nroute")
        if self.hangs is not None:
            self.hangs.wait()
        self.told.append(told)

    def start(self, directory, config, known):
        self._do("start", ("start", known))
        return known or "new"

    def add(self, record):
        self._do("add", (record["kind"], record["step"]))

    def finish(self, state):
        self._do("finish", ("finish", state))


@pytest.fixture
def watched(tmp_path):
    def go(service, steps, cut=None, state="finished"):
        said = []
        metrics = Metrics(tmp_path, False, forwarders=[Forwarder(service, tmp_path, tiny_config(), said.append)])
        if cut is not None:
            metrics.cut(cut)
        for step in steps:
            metrics.write(step, "train", loss=1.0)
            metrics.write(step, "valid", loss=1.0) if step % 2 == 0 else None
        metrics.finish(state)
        return said

    return go


def test_what_a_resumed_run_takes_again_is_not_sent_again(watched):
    first, second = Fake(), Fake()
    watched(first, [1, 2, 3], state="failed")
    assert first.told == [("start", None), ("train", 1), ("train", 2), ("valid", 2), ("train", 3), ("finish", "failed")]
    watched(second, [2, 3, 4], cut=1)
    assert second.told == [("start", "new"), ("train", 4), ("valid", 4), ("finish", "finished")]


def test_what_a_service_had_not_got_when_a_run_was_killed_it_gets_from_the_run_that_resumes_it(watched, monkeypatch):
    gone = threading.Event()
    first, second = Fake(), Fake()
    monkeypatch.setattr(first, "finish", lambda state: None)
    watched(first, [1, 2])
    monkeypatch.setattr(services, "PATIENCE", 0.1)
    watched(Fake(hangs=gone), [3, 4])  # it takes none of these, and the process ends
    watched(second, [2, 3, 4, 5], cut=1)
    gone.set()
    told = [("train", 3), ("train", 4), ("valid", 4), ("train", 5)]
    assert second.told == [("start", "new"), *told, ("finish", "finished")]


def test_a_run_that_was_stopped_is_not_finished_at_mlflow(train, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    log = {"mlflow": {"uri": (tmp_path / "server").as_uri(), "experiment": "e"}}
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / STOP_FILE).touch()
    train(log=log)
    client = MlflowClient(log["mlflow"]["uri"])
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert run.info.status == "KILLED" and run.data.tags["mlflow.user"]
    train(log=log)
    assert client.get_run(run.info.run_id).info.status == "FINISHED"


def test_a_service_that_is_switched_on_later_gets_what_was_before(tmp_path, watched):
    Metrics(tmp_path, False).write(1, "train", loss=2.0)
    service = Fake()
    watched(service, [2], cut=1)
    assert service.told == [("start", None), ("train", 1), ("train", 2), ("valid", 2), ("finish", "finished")]


@pytest.mark.parametrize("where", ("start", "add", "finish"))
def test_a_service_that_fails_is_a_warning_and_every_record_is_written(tmp_path, watched, where):
    said = watched(Fake(fails=where), [1, 2])
    assert said[-1] == "warning: nothing more is sent to fake (RuntimeError: no route); the run goes on"
    assert [r["step"] for r in read(tmp_path / "metrics.jsonl")] == [1, 2, 2]


def test_a_service_that_hangs_is_left_behind(tmp_path, watched, monkeypatch):
    monkeypatch.setattr(services, "PATIENCE", 0.1)
    free = threading.Event()
    said = watched(Fake(hangs=free), [1])
    free.set()
    assert "the run ends without it" in said[0]
    assert [r["step"] for r in read(tmp_path / "metrics.jsonl")] == [1]


def test_a_run_whose_services_cannot_be_reached_trains_on(train, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr("wandb.init", lambda **_: (_ for _ in ()).throw(OSError("not logged in")))
    _, _, state, directory = train(log={"wandb": {}, "mlflow": {"uri": "http://127.0.0.1:9"}})
    said = capsys.readouterr().out
    assert state.step == 20 and (directory / "checkpoints" / "step-0000020").is_dir()
    assert "nothing more is sent to wandb (OSError: not logged in)" in said and "nothing more is sent to mlflow" in said


@pytest.mark.parametrize("name", ("wandb", "mlflow"))
def test_a_service_that_is_not_installed_is_refused_at_once(train, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"log\.{name}: {name} is not installed"):
        train(log={name: {}})
