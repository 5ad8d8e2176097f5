"""From a number of parameters and of tokens to a config: width, layers, batch, steps and rates by rules that are known to hold.

width and layers  heads of 64 (of 32 below a width of 256), about d / 64 + 2 layers: 4 x 128, 10 x 512, 18 x 1024
batch             0.58 D^0.571 tokens for D tokens in all (Li et al., 2025, "Step Law"), to the next power of two
rates             `auto` (docs/recipes.md); warm-up 100 steps, or a tenth of them if those are fewer
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pkm.config.schema import Config, load
from pkm.corpus.store import vocab_size_of
from pkm.device import settled
from pkm.errors import UserError
from pkm.experiments.estimate import Estimator
from pkm.format import amount, duration, size
from pkm.model.cost import PAPER_VOCABULARY, flops, parameters, training_bytes

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
WIDEST = 8192
MOST_TOKENS = 10**18


def number(text: str, option: str) -> int:
    """20M, 1.5B or 20000000 -> a whole number above 0; UserError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGB]?)", text.strip().upper())
    if not found or not (value := round(float(found[1]) * UNITS[found[2]])):
        raise UserError(f"{text!r} is no number", option, "write for example 20M, 1.5B or 400000")
    return value


def proposed(base: Path, wanted: int, tokens: str, overrides: Sequence[str] = ()) -> list[str]:
    """Settings over `base` that make a model of about `wanted` dense parameters learn from so many `tokens` (400M, or 20x of
    the parameters); `overrides` win.

    UserError where no width comes near, or the tokens are no number.
    """
    config = load(base, overrides).config
    known, context = vocab_size_of(config.corpus.path), config.corpus.context
    vocab_size = known or PAPER_VOCABULARY
    dim, heads, layers = min(
        _shapes(), key=lambda shape: abs(parameters(_shaped(config, *shape), vocab_size).dense - wanted)
    )
    dense = parameters(_shaped(config, dim, heads, layers), vocab_size).dense
    if not wanted / 1.5 < dense < wanted * 1.5:
        what = (
            f"the nearest model has {amount(dense)}: with a vocabulary of {vocab_size:,} and widths from 32 to {WIDEST}"
        )
        prepare = (
            "a corpus with another vocabulary" if known else f"{config.corpus.path}, whose vocabulary is not known yet"
        )
        raise UserError(what, "--parameters", f"ask for another size, or prepare {prepare}")
    ratio = re.fullmatch(r"(\d+(?:\.\d+)?)x", tokens)
    total = round(float(ratio[1]) * dense) if ratio else number(tokens, "--tokens")
    if not 0 < total < MOST_TOKENS:
        raise UserError(f"a run cannot learn from {amount(total)} tokens", "--tokens", "write for example 400M or 20x")
    batch = context * 2 ** max(0, round(math.log2(max(0.58 * total**0.571 / context, 1))))
    steps = max(1, round(total / batch))
    settings = [f"model.layers={layers}", f"model.dim={dim}", f"model.heads={heads}"]
    for i, memory in enumerate(config.memories):
        section = f"memory.{i}" if isinstance(config.memory, tuple) else "memory"
        settings += [f"{section}.layers=null", f"{section}.count={len(config.layers_of(memory))}"]
    settings += [f"optim.steps={steps}", f"optim.batch_tokens={batch}"]
    settings += [f"optim.{group}.lr=auto" for group in ("dense", "embeddings", "addressing", "values")]
    return [*settings, f"optim.dense.warmup_steps={min(100, max(1, steps // 10))}", *overrides]


def _shapes() -> Iterator[tuple[int, int, int]]:
    """(width, heads, layers) that may be proposed."""
    for dim in [*range(32, 256, 32), *range(256, WIDEST + 1, 64)]:
        usual = round(dim / 64) + 2
        for layers in (usual - 1, usual, usual + 1):
            yield dim, dim // (32 if dim < 256 else 64), layers


def _shaped(config: Config, dim: int, heads: int, layers: int) -> Config:
    model = config.model.model_copy(update={"dim": dim, "heads": heads, "layers": layers})
    memory = tuple(m.model_copy(update={"layers": None, "count": len(config.layers_of(m))}) for m in config.memories)
    return config.model_copy(update={"model": model, "memory": memory or None})


def costs(config: Config) -> list[str]:
    """What a run of it would take here, in lines."""
    estimator = Estimator()
    vocab_size = estimator.vocabulary(config)
    count, work = parameters(config, vocab_size), flops(config, vocab_size).training
    speed, basis = estimator.tokens_per_second(config)
    tokens = config.optim.steps * config.optim.batch_tokens
    needed = training_bytes(settled(config), vocab_size).total
    return [
        f"{amount(count.dense)} dense parameters, {amount(count.values)} values, with a vocabulary of {vocab_size:,}",
        f"{amount(tokens)} tokens, {tokens / count.dense:.1f} a dense parameter; {amount(work * tokens)}FLOP",
        f"about {duration(tokens / speed)} here at {speed:,.0f} tokens/s ({basis}), {size(needed)} of memory",
    ]
