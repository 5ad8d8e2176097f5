"""Words per second of a model at inference, measured while nothing else runs and written to speed.json of its run.

As the paper does (section 4.2): forward passes over the test set after a warm-up. The paper also times models that it did
not train; then the weights are as initialised.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from pkm.checkpoint.checkpoints import Checkpoints
from pkm.config.schema import Config
from pkm.corpus.store import open_corpus
from pkm.device import configure_torch, decide, pick_device
from pkm.errors import UserError
from pkm.evaluation.evaluate import measure_speed
from pkm.files import atomic_write, json_text, read_json
from pkm.inference.trained import load_trained
from pkm.machine import card, machine, processor
from pkm.model.transformer import build_model

FILE = "speed.json"
SECONDS = 10.0
SPEEDS = ("words_per_second", "tokens_per_second")
ROUNDS = 3
"""Times that a grid measures each of its models, in turn with the others: what slows a machine down for a while then slows
down all of them, and no comparison of two rests on when each was measured."""


def time_run(config: Config, seconds: float = SECONDS, again: bool = False) -> dict[str, Any]:
    """Measure the model of a run, by its best checkpoint if there is one, and write speed.json into its directory.

    again    as one more round: the speeds are then the medians of all rounds, if the earlier ones measured the same here

    UserError if the corpus is not prepared or has no test split.
    """
    compute = decide(config)
    configure_torch(config, compute)
    trained = bool(Checkpoints(config.directory / "checkpoints", keep=config.checkpoint.keep).steps())
    if trained:
        found = load_trained(config.directory, "best", (f"corpus.path={json.dumps(str(config.corpus.path))}",))
        corpus, model, step = found.corpus, found.model, found.step
    else:
        corpus = open_corpus(config.corpus.path)
        model, step = build_model(config, corpus.vocab.size, corpus.vocab).to(compute.device).eval(), 0
    if corpus.test is None:
        raise UserError("the corpus has no test split", str(corpus.path), "prepare it with held-out articles")
    speed = measure_speed(model, corpus, corpus.test, config, compute, seconds)
    record: dict[str, Any] = {
        **vars(speed),
        "weights": f"step {step}" if trained else "as initialised",
        "trained": trained,
        "processor": processor(),
        "machine": machine(),
    }
    before = read_speed(config.directory) if again else None
    same = before is not None and all(before.get(name) == record[name] for name in record if name not in SPEEDS)
    rounds = {
        name: [*(before.get("rounds", {}).get(name, []) if same and before else []), record[name]] for name in SPEEDS
    }
    record |= {name: statistics.median(speeds) for name, speeds in rounds.items()}
    record |= {"rounds": rounds, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    atomic_write(config.directory / FILE, json_text(record, indent=2))
    return record


def read_speed(directory: Path) -> dict[str, Any] | None:
    """What speed.json of a run says; None without one."""
    return read_json(directory / FILE)


def seems_measured(directory: Path, trained: bool) -> bool:
    """Whether there is a measurement with weights trained or not, on whatever machine."""
    return (read_speed(directory) or {}).get("trained") == trained


def measured_here(config: Config, trained: bool) -> bool:
    """Whether speed.json holds what a grid would measure now: on this processor or card, in as many rounds, with weights trained or not."""
    record = read_speed(config.directory)
    if record is None or record.get("trained") != trained:
        return False
    if len(record.get("rounds", {}).get("words_per_second", [])) < ROUNDS:
        return False  # measured alone, or rounds that were interrupted
    device = pick_device(config)
    if device.type != "cuda":
        return record.get("processor") == processor() and str(record.get("device")).startswith(device.type)
    return record.get("device") == card()
