"""Weights & Biases and MLflow: the records of a run, sent on while it goes.

Everything happens in a thread of its own, and an error there is a warning: a service that is slow, full or gone neither stops
a run nor makes it wait. A run's id with a service, and how far it has been sent, lie in its directory, so that a resumed run
goes on there; what it takes again, from its checkpoint to where it had been, comes out the same and is not sent twice. A service
that is switched on later, or had not got all when a run was killed, gets the records of before, too.

W&B takes a record before its own process has written it: of a killed run it may lack the last ones.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from pkm.config.load import flatten
from pkm.config.schema import Config, MlflowConfig, WandbConfig
from pkm.errors import UserError
from pkm.files import atomic_write, read_json
from pkm.run.status import State

PATIENCE = 60.0
"""Seconds that a run's end waits for what is not sent yet."""
Record = dict[str, Any]


class Service(Protocol):
    name: str
    where: str
    """Once it has started: where to look."""

    def start(self, directory: Path, config: Config, known: str | None) -> str:
        """Begin a run there, or go on with the `known` one; its id."""

    def add(self, record: Record) -> None: ...

    def finish(self, state: State) -> None:
        """End the run there; one that was stopped may go on later."""


class Wandb:
    """Records as W&B's history, over the steps; samples of text as text."""

    name = "wandb"

    def __init__(self, settings: WandbConfig):
        self.settings = settings

    def start(self, directory: Path, config: Config, known: str | None) -> str:
        import wandb

        asked = self.settings
        mode = None if asked.mode == "online" else asked.mode  # so that WANDB_MODE can say otherwise
        self.run = wandb.init(
            project=asked.project, entity=asked.entity, group=asked.group, name=config.name, id=known, resume="allow",
            dir=directory, config=flatten(config.model_dump(mode="json")), mode=mode, settings=wandb.Settings(console="off", quiet=True),
        )  # fmt: skip
        self.where = self.run.url or self.run.settings.sync_dir
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        return self.run.id

    def add(self, record: Record) -> None:
        texts = {f"{record['kind']}/sample": sample(record)} if "sample" in record else {}
        self.run.log({"step": record["step"], **dict(numbers(record["kind"], record)), **texts})

    def finish(self, state: State) -> None:
        if state == "stopped":
            self.run.mark_preempting()
        self.run.finish(exit_code=int(state != "finished"))


class Mlflow:
    """Records as MLflow's metrics, settings as its parameters; samples of text as artifacts."""

    name = "mlflow"

    def __init__(self, settings: MlflowConfig):
        self.settings = settings

    def start(self, directory: Path, config: Config, known: str | None) -> str:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient
        from mlflow.tracking.context.registry import resolve_tags

        uri = self.settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or (config.runs / "mlruns").resolve().as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self.client, self.where = MlflowClient(uri), uri
        if known is not None:
            self.id = known
            self.client.update_run(known, "RUNNING")
            return known
        name = self.settings.experiment
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        self.id = self.client.create_run(experiment, tags=resolve_tags(), run_name=config.name).info.run_id
        settings = flatten(config.model_dump(mode="json"))
        parameters = [Param(key, str(value)[:6000]) for key, value in settings.items()]
        for first in range(0, len(parameters), 100):  # as many as MLflow takes at once
            self.client.log_batch(self.id, params=parameters[first : first + 100])
        return self.id

    def add(self, record: Record) -> None:
        from mlflow.entities import Metric

        time, step = int(1000 * record["time"]), record["step"]
        metrics = [Metric(key, value, time, step) for key, value in numbers(record["kind"], record)]
        for first in range(0, len(metrics), 1000):
            self.client.log_batch(self.id, metrics=metrics[first : first + 1000])
        if "sample" in record:
            self.client.log_text(self.id, sample(record), f"samples/step-{step:07d}.txt")

    def finish(self, state: State) -> None:
        self.client.set_terminated(self.id, {"finished": "FINISHED", "stopped": "KILLED"}.get(state, "FAILED"))


class Forwarder:
    """Sends records to one service, in a thread that begins with the first of them."""

    def __init__(self, service: Service, directory: Path, config: Config, say: Callable[[str], None]):
        self.service, self.directory, self.config, self.say = service, directory, config, say
        self.file = directory / f"{service.name}.json"
        self._waiting: queue.SimpleQueue[Record | State] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._taken: dict[str, int] = {}
        """Of each kind the last step that was sent or waits."""

    def begin(self, before: Sequence[Record]) -> None:
        """To be called once, before the first `add`; before: the records that there are already."""
        known = read_json(self.file) or {}
        self._taken = dict(known.get("sent", {}))
        arguments = known.get("id"), dict(self._taken)
        self._thread = threading.Thread(target=self._send, args=arguments, name=self.service.name, daemon=True)
        self._thread.start()
        for record in before:
            self.add(record)

    def add(self, record: Record) -> None:
        if record["step"] > self._taken.get(record["kind"], -1):
            self._taken[record["kind"]] = record["step"]
            self._waiting.put(record)

    def finish(self, state: State) -> None:
        """Wait until all is sent, for PATIENCE at most."""
        if self._thread is not None:
            self._waiting.put(state)
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                self.say(f"warning: {self.service.name} has not taken all in {PATIENCE:g} s; the run ends without it")

    def _send(self, known: str | None, sent: dict[str, int]) -> None:
        try:
            found = self.service.start(self.directory, self.config, known)
            self._keep(found, sent)
            self.say(f"{self.service.name}: {self.service.where}")
            while True:
                item = self._waiting.get()
                if isinstance(item, str):
                    self._keep(found, sent)
                    return self.service.finish(item)
                self.service.add(item)
                sent[item["kind"]] = item["step"]
                if self._waiting.empty():
                    self._keep(found, sent)
        except BaseException as error:
            reason = " ".join(str(error).split())[:300] or "no reason given"
            why = f"{type(error).__name__}: {reason}"
            self.say(f"warning: nothing more is sent to {self.service.name} ({why}); the run goes on")

    def _keep(self, known: str, sent: dict[str, int]) -> None:
        """For the process that resumes the run."""
        atomic_write(self.file, json.dumps({"id": known, "sent": sent}) + "\n")


def build_services(config: Config) -> list[Service]:
    """Those that the config asks for; UserError for one that is not installed."""
    services: list[Service] = []
    log = config.log
    for name, settings, package in (("wandb", log.wandb, "wandb"), ("mlflow", log.mlflow, "mlflow-skinny")):
        if settings is None:
            continue
        if importlib.util.find_spec(name) is None:
            raise UserError(f"{name} is not installed", f"log.{name}", f"pip install {package}, or set it to null")
        services.append(Wandb(settings) if isinstance(settings, WandbConfig) else Mlflow(settings))
    return services


def numbers(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers of a record, each with its path: train/memories/6/usage."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("kind", "step", "time"):
                yield from numbers(f"{tag}/{key}", inner)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from numbers(f"{tag}/{i}", inner)
    elif isinstance(value, int | float):
        yield tag, float(value)


def sample(record: Record) -> str:
    """What the model wrote, after what it was given."""
    return f"{record['sample']['prompt']} [...]{record['sample']['text']}"
