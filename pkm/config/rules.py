"""Combinations of settings that cannot be: those of one config, and those that so many ranks cannot share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pkm.config.kinds import READS, named
from pkm.config.memory_rules import OF_A_MEMORY

# A pkm.config.schema.Config: that page, which refuses what is impossible, comes after this one.
Config = Any
Mistake = tuple[str, str, str]
"""Dotted key to blame, what is wrong, how to fix it."""
# (dotted key, does it apply?, what is wrong, how to fix it)
Rule = tuple[str, Callable[[Config], bool], Callable[[Config], str], str]


IMPOSSIBLE: list[Rule] = [
    (
        "model.heads",
        lambda c: c.model.dim % c.model.heads != 0,
        lambda c: f"{c.model.heads} heads do not divide model.dim = {c.model.dim}",
        "choose heads that divide dim",
    ),
    (
        "model.kv_heads",
        lambda c: c.model.heads % (c.model.kv_heads or 1) != 0,
        lambda c: (
            f"{c.model.kv_heads} heads of keys and values cannot be shared evenly by model.heads = {c.model.heads}"
        ),
        "choose kv_heads that divide heads",
    ),
    (
        "model.positions",
        lambda c: c.model.positions == "rotary" and c.model.dim // c.model.heads % 2 != 0,
        lambda c: f"rotary positions turn pairs, and {c.model.dim // c.model.heads} numbers of a head are odd",
        "choose a dim that is a multiple of 2 * heads",
    ),
    (
        "model.experts.active",
        lambda c: c.model.experts is not None and c.model.experts.active > c.model.experts.count,
        lambda c: f"a token cannot be sent to {c.model.experts.active} of {c.model.experts.count} experts",
        "choose at most model.experts.count",
    ),
    (
        "model.experts.at",
        lambda c: c.model.experts is not None and not c.expert_layers,
        lambda c: "it names no layer, so that there would be no experts",
        "name layers that have a feed-forward network, or null for all of them",
    ),
    (
        "model.experts.at",
        lambda c: c.model.experts is not None and list(c.expert_layers) != sorted(set(c.expert_layers)),
        lambda c: f"{list(c.expert_layers)} is not in ascending order without repeats",
        "name each layer once, in ascending order",
    ),
    (
        "model.experts.at",
        lambda c: c.model.experts is not None and not {*c.expert_layers} <= {*c.feed_forward_layers},
        lambda c: (
            f"{list(c.expert_layers)} names a layer without a feed-forward network: there is one in {list(c.feed_forward_layers)}"
        ),
        "name layers that have one, or null for all of them",
    ),
    (
        "optim.batch_tokens",
        lambda c: c.optim.batch_tokens % c.corpus.context != 0,
        lambda c: (
            f"{c.optim.batch_tokens} tokens are not a whole number of windows of corpus.context = {c.corpus.context}"
        ),
        "choose a multiple of the context",
    ),
    (
        "evaluate.stride",
        lambda c: (c.evaluate.stride or 0) > c.corpus.context,
        lambda c: f"a stride of {c.evaluate.stride} would leave out tokens of windows of {c.corpus.context}",
        "choose at most corpus.context",
    ),
    (
        "optim.values.clip",
        lambda c: c.optim.values.update == "in_backward" and c.optim.values.clip is not None,
        lambda c: "update: in_backward applies Adam inside backward, before the norm of the gradient is known",
        "use update: sparse, or clip: null",
    ),
    (
        "optim.values.update",
        lambda c: c.optim.values.update == "in_backward" and c.precision == "fp16",
        lambda c: (
            "in_backward moves rows inside backward, before fp16's loss scaler knows whether the step must be skipped"
        ),
        "use update: sparse, or precision: bf16",
    ),
    (
        "optim.values.dtype",
        lambda c: c.optim.values.update == "dense" and c.optim.values.dtype not in ("auto", "fp32"),
        lambda c: "update: dense keeps values in fp32",
        "use update: sparse, or dtype: fp32",
    ),
    (
        "optim.values.state_dtype",
        lambda c: c.optim.values.update == "dense" and c.optim.values.state_dtype != "fp32",
        lambda c: "update: dense keeps Adam's moments of the values in fp32",
        "use update: sparse, or state_dtype: fp32",
    ),
    (
        "optim.values.weight_decay",
        lambda c: c.optim.values.weight_decay > 0 and c.optim.values.update == "in_backward",
        lambda c: "update: in_backward moves rows by their gradients alone",
        "use update: sparse, or weight_decay: 0",
    ),
    (
        "optim.values.weight_decay",
        lambda c: c.optim.values.weight_decay > 0 and c.optim.values.dtype == "bf16",
        lambda c: "what a step's decay takes from a number in bf16 is lost to rounding",
        "use dtype: fp32 or bf16+master, or weight_decay: 0",
    ),
    *(
        (
            f"optim.{name}.weight_decay",
            lambda c, name=name: _decayed(c, name) > 1,
            lambda c, name=name: (
                f"a step would take {_decayed(c, name):g} times every weight from it: the learning rate times the decay"
            ),
            "choose a weight_decay of at most 1 / lr; 0.1 is usual",
        )
        for name in ("dense", "matrices", "embeddings", "addressing", "values")
    ),
    (
        "optim.values.staleness",
        lambda c: c.optim.values.staleness and c.optim.values.update in ("dense", "in_backward"),
        lambda c: f"update: {c.optim.values.update} does not know which rows a step read",
        "use update: sparse, or staleness: false",
    ),
]


def _decayed(config: Config, name: str) -> float:
    """The share of a weight that a step at the peak rate of its group takes from it; 0 of a group that does not set its decay."""
    own = getattr(config.optim, name)
    if own is None or own.weight_decay is None or "auto" in (own.lr, config.optim.dense.lr):
        return 0.0  # auto stands only in a config with other mistakes
    group = config.optim.group(name)
    return float(group.lr * group.weight_decay)


def impossible(config: Config) -> list[Mistake]:
    """What every rule of `IMPOSSIBLE` and `OF_A_MEMORY` that `config` breaks says of it.

    A config may lack settings that are wrong themselves (pkm.config.load.load): rules that read one do not apply.
    """
    found = []
    for key, applies, what, fix in IMPOSSIBLE:
        try:
            if applies(config):
                found.append((key, what(config), fix))
        except AttributeError:
            continue
    return found + _impossible_memories(config)


def _impossible_memories(config: Config) -> list[Mistake]:
    memories = getattr(config, "memory", None) or ()
    if not isinstance(memories, tuple):
        return _impossible_memory(config, memories, "memory")
    found: list[Mistake] = []
    taken: dict[tuple[int, str], str] = {}
    for i, memory in enumerate(memories):
        section = f"memory[{i}]"
        found += _impossible_memory(config, memory, section)
        try:
            for layer in dict.fromkeys(config.layers_of(memory)):
                other = taken.setdefault((layer, memory.place), section)
                if other != section:
                    what = f"{other} has a memory at layer {layer} with place: {memory.place} already"
                    found.append((f"{section}.layers", what, "name another layer, or choose another place"))
        except AttributeError:
            continue
    return found


def _impossible_memory(config: Config, memory: Any, section: str) -> list[Mistake]:
    found = []
    for key, applies, what, fix in OF_A_MEMORY:
        try:
            if applies(config, memory):
                found.append((f"{section}.{key}", what(config, memory), fix))
        except AttributeError:
            continue
    return found


def cut_short(config: Config) -> str:
    """What to say of groups whose warm-up the run does not live to see the end of; "" if there are none."""
    steps, names = config.optim.steps, ["dense", "embeddings"] + (["addressing", "values"] if config.memory else [])
    longer = {name: config.optim.group(name).warmup_steps for name in names}
    longer = {name: warmup for name, warmup in longer.items() if warmup > steps}
    if not longer:
        return ""
    reached = ", ".join(f"{name} {100 * steps / warmup:.0f} % of it" for name, warmup in longer.items())
    return (
        f"warning: the run ends after {steps:,} steps, within the warm-up, and rates never reach their peak: {reached}; "
        "set optim.steps higher, or warmup_steps lower"
    )


def impossible_for(config: Config, ranks: int) -> list[Mistake]:
    """As `impossible`, for what depends on the number of processes that torchrun started."""
    found = []
    if config.sequences % ranks:
        what = (
            f"{config.optim.batch_tokens} tokens are {config.sequences} windows of corpus.context = {config.corpus.context}, "
            + (
                f"fewer than the {ranks} ranks"
                if config.sequences < ranks
                else f"which {ranks} ranks cannot share evenly"
            )
        )
        found.append(("optim.batch_tokens", what, f"choose a multiple of {ranks * config.corpus.context}"))
    if config.parallel.values == "sharded":
        uneven = [width for m in config.memories for width in _table_widths(config, m) if width % ranks]
        if uneven:
            what = f"{ranks} ranks cannot share the {uneven[0]} columns of the values evenly"
            fix = "choose a model.dim (and memory.values_dim, input_dim) that the ranks divide, or values: replicated"
            found.append(("parallel.values", what, fix))
    if config.memory and config.optim.values.update == "in_backward":
        if config.optim.micro_batch and config.optim.micro_batch < config.sequences // ranks:
            what = "update: in_backward moves rows inside backward, and with accumulation a gradient is whole only after the last"
            found.append(("optim.micro_batch", what, "use update: sparse, or micro_batch: null"))
        if ranks > 1 and config.parallel.values == "replicated":
            what = f"in_backward moves rows inside backward, without the gradients of the other {ranks - 1} ranks"
            found.append(("optim.values.update", what, "use update: sparse, or parallel.values: sharded"))
    return found


def _table_widths(config: Config, memory: Any) -> tuple[int, ...]:
    return tuple(named(READS[memory.read].cost)(memory, config.model.dim).widths)
