"""Tiny real runs to interrupt, and what two of them must have in common."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from pkm.checkpoint.checkpoints import Checkpoints
from pkm.checkpoint.verify import verify
from pkm.run.metrics import read
from pkm.run.status import read_status
from tests.support.train_server import Ended, Job, Ranks, Server

# What may differ between two runs that are otherwise the same.
TIMES = {"time", "tokens_per_second", "peak_memory_bytes"}

SETTINGS = """
name: {name}
runs: {root}/runs
corpus: {{path: {corpus}, context: 8}}
model: {{layers: 2, dim: 16, heads: 2, dropout: 0.1}}
memory: {{layers: [2], sub_keys: 8, heads: 2, knn: 3, query: {{dim: 8}}}}
optim:
  steps: 24
  batch_tokens: 64
  micro_batch: 4
  dense: {{lr: 1e-2, warmup_steps: 5}}
  values: {{lr: 1e-2}}
precision: fp32
device: cpu
threads: 1
checkpoint: {{every_steps: 4, keep: 2}}
evaluate: {{every_steps: 6, batch: 4, sample: 4}}
log: {{every_steps: 1}}
"""


class Runs:
    """Runs below `root` on one corpus, started through a warm server. `start("a", "seed=2")` is run `a` with seed 2."""

    def __init__(self, server: Server, root: Path, corpus: Path):
        self.server, self.root, self.corpus = server, root, corpus

    def directory(self, name: str) -> Path:
        return self.root / "runs" / name

    def settings(self, name: str) -> Path:
        path = self.root / f"{name}.yaml"
        path.write_text(SETTINGS.format(name=name, root=self.root, corpus=self.corpus))
        return path

    def start(self, name: str, *overrides: str, **options: Any) -> Job:
        return self.server.start(str(self.settings(name)), *overrides, **options)

    def run(self, name: str, *overrides: str, **options: Any) -> Ended:
        return self.start(name, *overrides, **options).wait()

    def start_ranks(self, ranks: int, name: str, *overrides: str, on: dict[int, dict[str, Any]] | None = None) -> Ranks:
        """The run on several processes; `on[r]` are the options of rank r."""
        return self.server.start_ranks(ranks, str(self.settings(name)), *overrides, on=on)

    def run_ranks(
        self, ranks: int, name: str, *overrides: str, on: dict[int, dict[str, Any]] | None = None
    ) -> list[Ended]:
        return self.start_ranks(ranks, name, *overrides, on=on).wait()

    def finish(self, ranks: int, name: str, *overrides: str) -> list[Ended]:
        """Let the run go on to its end."""
        ended = self.run_ranks(ranks, name, *overrides)
        assert [e.code for e in ended] == [0] * ranks, [e.err for e in ended]
        assert self.status(name)[0] == "finished"
        return ended

    @staticmethod
    def moment(generator: random.Random) -> dict[str, Any]:
        """Options of a run of 24 steps that has it killed at a random moment: in its start, a step, a save or its report.

        A step calls about 20,000 functions, a save 130,000 more, the start 300,000: counted, since on a busy machine random
        seconds would all fall into the start.
        """
        step = generator.randrange(24)
        return {"when": {"step": step, "dies_after": generator.randint(1, 150_000 if step else 300_000)}}

    def holder(self, name: str) -> dict[str, Any]:
        """Who says to be at work on the run."""
        return json.loads((self.directory(name) / "lock").read_text())

    def log(self, name: str) -> str:
        return (self.directory(name) / "log.txt").read_text()

    def checkpoints(self, name: str) -> Checkpoints:
        return Checkpoints(self.directory(name) / "checkpoints", keep=2, warn=lambda line: None)

    def status(self, name: str) -> tuple[str, int, str]:
        status = read_status(self.directory(name))
        return status["state"], status["step"], status["reason"]

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """All records but what depends on time."""
        records = read(self.directory(name) / "metrics.jsonl")
        return [{key: value for key, value in record.items() if key not in TIMES} for record in records]

    def outcome(self, name: str, other_saves: bool = False) -> dict[str, Any]:
        """What must be the same, bit by bit, in two runs that came to the same end.

        other_saves    the run was also saved when it was told to stop: compare the last checkpoint and the best one only
        """
        checkpoints = self.checkpoints(name)
        last, best = checkpoints.load("latest"), checkpoints.load("best")
        report = json.loads((self.directory(name) / "report.json").read_text())
        kept = [last.directory, best.directory] if other_saves else map(checkpoints.directory, checkpoints.steps())
        return {
            "status": self.status(name),
            "checkpoints": {path.name: self.content(path) for path in kept},
            "pointers": [(checkpoints.root / pointer).read_text() for pointer in ("latest", "best")],
            "metrics": self.metrics(name),
            "report": {key: value for key, value in report.items() if key not in ("run", "speed")},
        }

    def losses(self, name: str) -> list[float]:
        return [record["loss"] for record in self.metrics(name) if record["kind"] == "train"]

    @staticmethod
    def content(path: Path) -> tuple[Any, ...]:
        """Hashes of all tensors (weights, moments) and the whole record of a checkpoint."""
        manifest = verify(path)
        return manifest["files"], manifest["tensors"], manifest["record"], manifest["step"]
