"""The self-test: does training work on this machine at all?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from pkm.config.schema import Config, CorpusConfig, DenseOptim, MemoryConfig, ModelConfig, OptimConfig
from pkm.doctor.finding import Finding

SECONDS = 8.0
STEPS = 300
ENOUGH_STEPS = 100
"""By then the loss is low, with room to spare."""
VOCABULARY = 64


def self_test() -> Iterator[Finding]:
    """A tiny model with a memory learns a made-up language in which every token decides the next one, on the device
    that a run would take: its loss must fall from log(vocabulary) to under half of that."""
    import math

    start = time.perf_counter()
    config = Config(
        name="self-test",
        corpus=CorpusConfig(path=Path(), context=32),
        model=ModelConfig(layers=2, dim=64, heads=4),
        memory=MemoryConfig(layers=(1,), sub_keys=16, heads=2, knn=4),
        optim=OptimConfig(steps=STEPS, batch_tokens=512, dense=DenseOptim(lr=3e-3, warmup_steps=20)),
    )
    losses, device = _train(config, start + SECONDS)
    seconds = time.perf_counter() - start
    found = f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} steps, {seconds:.1f} s on {device}"
    finite, learned = all(map(math.isfinite, losses)), losses[-1] < 0.5 * math.log(VOCABULARY)
    if finite and learned:
        yield Finding("self-test", "ok", found)
    elif finite and len(losses) < ENOUGH_STEPS:
        yield Finding("self-test", "note", found, "too slow to tell whether it learns: is the machine busy?")
    else:
        yield Finding("self-test", "fail", found, "training does not work here: run `make test`")


def _train(config: Config, deadline: float) -> tuple[list[float], str]:
    """Losses in nats per token, step by step, until the steps are done, the loss is low or the time is over."""
    import torch

    from pkm.device import configure_torch, decide, settled_optim
    from pkm.model.transformer import build_model
    from pkm.train.optim import build_optimizers

    compute = decide(config)
    threads = torch.get_num_threads()
    configure_torch(config, compute)
    # So small a model is no faster on several threads, and on a busy machine much slower.
    torch.set_num_threads(1)
    model = build_model(config, VOCABULARY).to(compute.device)
    optim = build_optimizers(settled_optim(config, compute), model)
    generator = torch.Generator().manual_seed(config.seed)
    # Ids below 14 are special ones; <pad> among them must not be drawn.
    successor = 14 + torch.randperm(VOCABULARY - 14, generator=generator)
    losses: list[float] = []
    while len(losses) < config.optim.steps and (not losses or (losses[-1] > 0.2 and time.perf_counter() < deadline)):
        tokens = torch.empty(config.sequences, config.corpus.context + 1, dtype=torch.long)
        tokens[:, 0] = torch.randint(14, VOCABULARY, (config.sequences,), generator=generator)
        for i in range(config.corpus.context):
            tokens[:, i + 1] = successor[tokens[:, i] - 14]
        tokens = tokens.to(compute.device)
        loss = model(tokens[:, :-1], tokens[:, 1:]) / config.optim.batch_tokens
        loss.backward()
        optim.step(len(losses) + 1, optim.gradient_norms())
        optim.clear()
        losses.append(float(loss.detach()))
    torch.set_num_threads(threads)
    return losses, str(compute.device)
