"""What a few training steps give on one or several ranks: losses, gradients, norms, usage, evaluations.

In this process for one rank; `torchrun ... -m tests.support.ranks CORPUS OUT CASE...` for several.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from pkm.config.schema import Config
from pkm.corpus.batches import TrainingBatches
from pkm.corpus.store import open_corpus
from pkm.device import decide
from pkm.distributed import dist
from pkm.distributed.collectives import gather
from pkm.evaluation.evaluate import evaluate
from pkm.memory.adam import ValuesAdam
from pkm.model.transformer import Block, build_model
from pkm.train.optim import build_optimizers
from pkm.train.parallel import apply_parallelism, distribute
from pkm.train.step import backward
from tests.support.tiny import tiny_config

STEPS = 3
# The rows of the README's table that several ranks have, and what else it says may be asked for.
WAYS = ("replicated-sparse", "replicated-dense", "sharded-sparse", "sharded-dense", "sharded-in_backward")
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    # LayerNorm on the query: BatchNorm's statistics are those of a micro-batch.
    "accumulated": {"memory": {"query": {"norm": "layer"}}, "optim": {"micro_batch": 1}},
    "bf16": {"precision": "bf16"},
    "recomputed": {"parallel": {"activation_checkpointing": True}},
    "compiled": {"compile": True},
    "today": {
        "model": {
            "positions": "rotary",
            "norm_type": "rms",
            "activation": "swiglu",
            "kv_heads": 1,
            "qk_norm": True,
            "experts": {"count": 3, "balance": 1.0},
            "tie_embeddings": False,
        },
        "memory": {"place": "beside"},
    },
}
# Refused (in_backward, accumulated), or the same graph as another that is compiled here, which takes seconds.
LEFT_OUT = (
    *(f"{way}-today" for way in WAYS[1:]),
    "sharded-in_backward-accumulated", "sharded-sparse-compiled", "sharded-dense-compiled",
)  # fmt: skip
CASES = [case for way in WAYS for asked in ASKED if (case := f"{way}-{asked}") not in LEFT_OUT]


def settings(corpus: Path, case: str) -> Config:
    values, update, asked = case.split("-")
    clip = None if update == "in_backward" else 0.05
    sections = {"corpus": {"path": str(corpus)}, "precision": "fp32", **ASKED[asked]}
    sections["parallel"] = {"values": values, **sections.get("parallel", {})}
    # A gradient that is zero but for rounding (a query's bias, under BatchNorm) would take Adam's whole step, anywhere.
    dense = {"eps": 1e-6}
    sections["optim"] = {"dense": dense, "values": {"update": update, "clip": clip}, **sections.get("optim", {})}
    return tiny_config(**sections)


def measure(corpus_path: Path, case: str) -> dict[str, Any]:
    """Everything of `STEPS` steps with a global batch of 8 windows; whole tensors, also where the values are sharded."""
    config = settings(corpus_path, case)
    corpus = open_corpus(corpus_path)
    with without_inductor() if config.compile else nullcontext():
        model = apply_parallelism(build_model(config, corpus.vocab.size), config)
    optim = build_optimizers(config.optim, model)
    module, compute = distribute(model), decide(config)
    batches = TrainingBatches(corpus.train, 8, 8, seed=1)
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "usage": []}
    found["valid"] = [valid_numbers(model, corpus, config, compute)]
    for step in range(1, STEPS + 1):
        optim.clear()
        optim.begin(step)
        inputs, targets = map(torch.from_numpy, batches.slice(step - 1, *dist.share(8)))
        loss, usage = backward(config, compute, module, model, (inputs, targets), 1.0, measures=True)
        optim.sum_over_ranks()
        norms = optim.gradient_norms()
        found["losses"].append(float(dist.all_reduce(loss)))
        found["norms"].append({name: float(norm) for name, norm in norms.items()})
        found["usage"].append((usage.memories[2].result().percent, usage.memories[2].result().kl))
        found["gradients"].append({**dense_gradients(model), "values": value_gradient(model, optim)})
        optim.step(step, norms)
        found["valid"].append(valid_numbers(model, corpus, config, compute))
    found["replicas differ in"] = differing(model, optim) if dist.world_size() > 1 else []
    return found


def without_inductor() -> AbstractContextManager[Any]:
    """Blocks compiled in one graph each, or an error; a C++ compiler, which the rest would need, is not a given."""
    torch._dynamo.reset()
    return patch.object(Block, "compile", partialmethod(torch.nn.Module.compile, fullgraph=True, backend="aot_eager"))


def differing(model, optim):
    """Names of the tensors that are to be the same on every rank and are not, to the last bit."""
    tensors = model.state_dict() | optim.state_tensors()
    alike = [name for name in tensors if not (model.memory(2).values.sharded and ".values." in name)]
    return [name for name in alike if not (gather(tensors[name]) == tensors[name]).all()]


def valid_numbers(model, corpus, config, compute):
    measured = evaluate(model, corpus, corpus.valid, config, compute)
    return measured.loss, measured.tokens, measured.memories[2].percent, measured.memories[2].kl


def dense_gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and ".values." not in n}


def value_gradient(model, optim):
    """Of `update: in_backward`, which leaves none, the running mean that it went into."""
    table, group = model.memory(2).values, optim.values
    gradient = torch.zeros_like(table.weight)
    if isinstance(group, ValuesAdam) and group.in_backward:
        gradient += group.moments[0][0]
    elif isinstance(group, ValuesAdam):
        rows, values = table.gradient()
        gradient[rows] = values
    else:
        gradient += table.weight.grad
    return whole(model, "values.", gradient)


def whole(model, name, tensor):
    if "values." not in name or not model.memory(2).values.sharded:
        return tensor
    return torch.cat(list(gather(tensor)), dim=1)


def main() -> None:
    corpus, out, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter(
        "error", FutureWarning
    )  # what torch says of its own ways to be called: both versions take ours
    dist.start(torch.device("cpu"))
    found = {case: measure(Path(corpus), case) for case in cases}
    if dist.is_main():
        torch.save(found, out)
    dist.stop()


if __name__ == "__main__":
    main()
