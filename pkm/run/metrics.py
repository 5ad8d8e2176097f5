"""What a run measured: one JSON line an event in `metrics.jsonl`; TensorBoard's files are made from the same records.

A record: {"kind": "train" | "valid" | "test" | "event", "step": int, "time": seconds since 1970, ...values}. Values are
numbers, texts, or dicts and lists of them; a number that is not finite is written as null. Steps ascend.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from pkm import files
from pkm.distributed import dist
from pkm.errors import UserError
from pkm.run.services import Forwarder, numbers
from pkm.run.status import State

Kind = Literal["train", "valid", "test", "event"]
FILE = "metrics.jsonl"


class Metrics:
    """The records of the run in `directory`.

    tensorboard    also write event files below `directory`/tensorboard; UserError if it is not installed
    may_write      asked before each record; where it says no, the directory is another process's and nothing is written
    forwarders     of services that get the records too
    """

    def __init__(
        self,
        directory: Path,
        tensorboard: bool,
        may_write: Callable[[], bool] = lambda: True,
        forwarders: Sequence[Forwarder] = (),
    ):
        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            fix = "pip install tensorboard, or set it to false"
            raise UserError("tensorboard is not installed", "log.tensorboard", fix)
        self.path = directory / FILE
        self.last_step = 0
        self._may_write = may_write
        self._file: IO[bytes] | None = None
        self._curves = Curves(directory / "tensorboard") if tensorboard else None
        self._forwarders, self._forwarding = forwarders, False

    def write(self, step: int, kind: Kind, **values: Any) -> None:
        """Append a record and hand it to the system at once; only rank 0 does. UserError if the disk is full."""
        self.last_step = step
        if not dist.is_main() or not self._may_write():
            return
        self._begin_forwarding()
        record = files.finite({"kind": kind, "step": step, "time": time.time(), **values})
        with files.explained(self.path):
            if self._file is None:
                self._file = self.path.open("ab")
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
            if self._curves is not None:
                self._curves.add(record)
        for forwarder in self._forwarders:
            forwarder.add(record)

    def sync(self) -> None:
        """Make what was written durable, so that a checkpoint never knows of a step whose records are lost."""
        if self._file is not None:
            with files.explained(self.path):
                os.fsync(self._file.fileno())

    def cut(self, step: int) -> None:
        """Drop every record of a later step, and lines that are no records, and draw the curves anew from the rest.

        For a run that goes on from the checkpoint of `step`: what comes after it will be written again. That includes
        the test record of the same step, which is measured on the last checkpoint.
        """
        if not dist.is_main():
            return
        self._begin_forwarding()
        self.close()
        with files.explained(self.path):
            kept = [r for r in read(self.path) if r["step"] < step + (r["kind"] != "test")]
            text = "".join(json.dumps(record) + "\n" for record in kept).encode()
            if self.path.exists() and self.path.read_bytes() != text:
                files.atomic_write(self.path, text)
            if self._curves is not None:
                self._curves.redraw(kept)

    def close(self) -> None:
        """Finish the files; a later `write` opens them again."""
        for file in (self._file, self._curves):
            if file is not None:
                file.close()
        self._file = None

    def finish(self, state: State) -> None:
        """Close the files, and end the run with the services that know of it."""
        self.close()
        for forwarder in self._forwarders if self._forwarding else ():
            forwarder.finish(state)

    def _begin_forwarding(self) -> None:
        """With what there is before the first record of this process is written, or the first is cut."""
        if self._forwarders and not self._forwarding:
            self._forwarding = True
            before = list(read(self.path))
            for forwarder in self._forwarders:
                forwarder.begin(before)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, in order; none if it does not exist. Lines that are no records are left out.

    UserError where it cannot be read.
    """
    if not path.exists():
        return
    with files.explained(path), path.open("rb") as file:
        yield from records(file)


def records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Those that are whole: a line that was cut off, or holds none, is left out."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if (
            line.endswith(b"\n")
            and isinstance(record, dict)
            and isinstance(record.get("step"), int)
            and "kind" in record
        ):
            yield record


class Curves:
    """TensorBoard event files of one run, written without threads and flushed at every record."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._file: IO[bytes] | None = None

    def add(self, record: dict[str, Any]) -> None:
        """Append the numbers of a record, and its sample of text; a nested value's tag is its path: train/memory/6/usage."""
        self._write([record])

    def redraw(self, records: list[dict[str, Any]]) -> None:
        """Replace what there is by the curves of `records`. A TensorBoard that is watching forgets what it had read."""
        self.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        if records:
            self._write(records)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, records: list[dict[str, Any]]) -> None:
        # Imported late: it takes a second, and a run without TensorBoard needs none of it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._file is None:
            name = f"events.out.tfevents.{time.time_ns() // 1000:017d}.{socket.gethostname()}"
            with files.explained(self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
                self._file = (self.directory / name).open("xb")
            start = SessionLog(status=SessionLog.START)
            events = [Event(wall_time=time.time(), file_version="brain.Event:2")]
            events += [Event(wall_time=time.time(), step=records[0]["step"], session_log=start)]
        else:
            events = []
        for record in records:
            tag = str(record["kind"])
            values = [Summary.Value(tag=path, simple_value=x) for path, x in numbers(tag, record)]
            if sample := record.get("sample"):
                text = f"{sample['prompt']} **{sample['text']}**".encode()
                value = TensorProto(dtype=DT_STRING, string_val=[text], tensor_shape=TensorShapeProto())
                values.append(
                    Summary.Value(tag=f"{tag}/sample", metadata=create_summary_metadata("", ""), tensor=value)
                )
            if values:
                events.append(Event(wall_time=record["time"], step=record["step"], summary=Summary(value=values)))
        writer = RecordWriter(self._file)
        for event in events:
            writer.write(event.SerializeToString())
        self._file.flush()
