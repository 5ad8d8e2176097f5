"""Whole runs of a tiny config: straight through and resumed, on several ranks and on one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pkm.checkpoint.checkpoints import Checkpoints
from pkm.config.load import dump
from pkm.config.schema import Config
from pkm.corpus.store import open_corpus
from pkm.device import configure_torch, decide, settled_optim
from pkm.evaluation.report import report
from pkm.model.transformer import Transformer
from pkm.run.run import Run
from pkm.run.stop import StopFlag
from pkm.train import loop
from pkm.train.first_model import first_model
from pkm.train.optim import Optimizers, build_optimizers
from pkm.train.parallel import apply_parallelism
from pkm.train.state import State, restore
from tests.support.fork import on_ranks
from tests.support.tiny import everything, tiny_config

Make = Callable[[str, int], Config]
"""A run's name and its steps -> its config."""


def trained(config: Config, reports: bool = False) -> tuple[Transformer, Optimizers, State]:
    """Train as train.py does, on all ranks that there are, and with `reports` write the report."""
    corpus, compute = open_corpus(config.corpus.path), decide(config)
    configure_torch(config, compute)
    with Run.open(config, dump(config)) as run:
        model = apply_parallelism(first_model(run, corpus), config).to(compute.device)
        optim = build_optimizers(settled_optim(config, compute), model)
        state = restore(run, compute, model, optim, corpus)
        state = loop.train(run, compute, corpus, model, optim, state, StopFlag())
        if reports:
            report(run, compute, corpus, model, StopFlag())
    return model, optim, state


class Straight(NamedTuple):
    model: Transformer
    tensors: dict[str, Tensor]
    """Of its end: weights and the optimizers' state."""
    records: list[dict[str, Any]]
    """What it logged of training."""
    directory: Path


def straight_as_resumed(train: Callable[..., Any], **sections: Any) -> Straight:
    """A run of 20 steps that learns, and that ends to the last bit as one which was resumed after 10."""
    model, optim, _, directory = train(name="straight", **sections)
    train(name="resumed", **sections, optim={"steps": 10})
    resumed, its_optim, state, _ = train(name="resumed", **sections)
    ours, theirs = everything(resumed, its_optim), everything(model, optim)
    assert state.step == 20 and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    records = [line for line in lines if line["kind"] == "train"]
    assert records[-1]["loss"] < records[0]["loss"]
    return Straight(model, theirs, records, directory)


def with_values(
    values: str, corpus: Path, folder: Path, config: Callable[..., Config] = tiny_config, **sections: Any
) -> Make:
    """Runs below `folder` whose values are replicated or sharded, and whose rate does not depend on how many steps there are."""
    places = {"runs": str(folder), "corpus": {"path": str(corpus)}, "parallel": {"values": values}}

    def make(name: str, steps: int) -> Config:
        return config(name=name, optim={"steps": steps, "dense": {"schedule": "constant"}}, **places, **sections)

    return make


class ManyAndOne(NamedTuple):
    many: dict[str, Tensor]
    """The last checkpoint's tensors of several ranks."""
    one: dict[str, Tensor]
    reports: tuple[dict[str, Any], dict[str, Any]]
    found: list[Any]
    """Of each rank's model."""

    def assert_close(self, *names: str, rtol: float = 1e-3, atol: float = 1e-4) -> None:
        for name in names:
            torch.testing.assert_close(self.many[name], self.one[name], rtol=rtol, atol=atol)


def many_and_one(
    make: Make, ranks: int, steps: int, found: Callable[[Transformer], Any] = lambda model: None
) -> ManyAndOne:
    """Train and report `many` on several ranks and `one` on one; both save tensors of the same names and shapes."""
    seen = on_ranks(ranks, lambda rank: found(trained(make("many", steps), reports=True)[0]))
    trained(make("one", steps), reports=True)
    directories = [make(name, steps).directory for name in ("many", "one")]
    many, one = (Checkpoints(path / "checkpoints", keep=3).load("latest").tensors for path in directories)
    assert {name: t.shape for name, t in many.items()} == {name: t.shape for name, t in one.items()}
    first, second = (json.loads((path / "report.json").read_text()) for path in directories)
    return ManyAndOne(many, one, (first, second), seen)
