"""What a few training steps give on one or several ranks: losses, gradients, norms, usage, evaluations.

In this process for one rank; `torchrun ... -m tests.ranks CORPUS OUT CASE...` for several.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from pkm import dist, trainer
from pkm.collectives import gather
from pkm.corpus.batches import TrainingBatches
from pkm.corpus.store import open_corpus
from pkm.evaluate import evaluate
from pkm.memory.adam import ValuesAdam
from pkm.model import build_model
from pkm.optim import build_optimizers
from pkm.parallel import distribute, prepare
from tests.tiny import tiny_config

STEPS = 3
CASES = [
    f"{values}-{update}-{micro}"
    for values in ("replicated", "sharded")
    for update in ("sparse", "dense")
    for micro in ("whole", "accumulated")
]


def measure(corpus_path: Path, case: str) -> dict[str, Any]:
    """Everything of `STEPS` steps with a global batch of 8 windows; whole tensors, also where the values are sharded."""
    values, update, micro = case.split("-")
    config = tiny_config(
        corpus={"path": str(corpus_path)},
        parallel={"values": values},
        memory={"query": {"norm": "batch" if micro == "whole" else "layer"}},
        optim={"micro_batch": None if micro == "whole" else 1, "values": {"update": update, "clip": 0.05}},
    )
    corpus = open_corpus(corpus_path)
    model = prepare(build_model(config, corpus.vocab.size), config)
    optim = build_optimizers(config.optim, model)
    module = distribute(model)
    batches = TrainingBatches(corpus.train, 8, 8, seed=1)
    found: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "usage": []}
    found["valid"] = [valid_numbers(model, corpus, config)]
    for step in range(1, STEPS + 1):
        optim.clear()
        batch = batches.slice(step - 1, *dist.share(8))
        loss, meters = trainer.backward(config, module, model, batch, 1.0, "fp32", measures=True)
        optim.sum_over_ranks()
        norms = optim.gradient_norms()
        found["losses"].append(loss)
        found["norms"].append(norms)
        found["usage"].append((meters[2].result().percent, meters[2].result().kl))
        found["gradients"].append({**dense_gradients(model), "values": value_gradient(model, optim)})
        optim.step(step, norms)
        found["valid"].append(valid_numbers(model, corpus, config))
    return found


def valid_numbers(model, corpus, config):
    measured = evaluate(model, corpus, corpus.valid, config)
    return measured.loss, measured.tokens, measured.memories[2].percent, measured.memories[2].kl


def dense_gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and ".values." not in n}


def value_gradient(model, optim):
    table = model.memory(2).values
    gradient = torch.zeros_like(table.weight)
    if isinstance(optim.groups["values"], ValuesAdam):
        rows, values = table.gradient()
        gradient[rows] = values
    else:
        gradient += table.weight.grad
    return whole(model, "values.", gradient)


def whole(model, name, tensor):
    if "values." not in name or not model.memory(2).sharded:
        return tensor
    return torch.cat(list(gather(tensor)), dim=1)


def main() -> None:
    corpus, out, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    dist.start(torch.device("cpu"))
    found = {case: measure(Path(corpus), case) for case in cases}
    if dist.is_main():
        torch.save(found, out)
    dist.stop()


if __name__ == "__main__":
    main()
