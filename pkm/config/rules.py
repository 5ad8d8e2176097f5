"""Combinations of settings that cannot be: those of one config, and those that so many ranks cannot share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pkm.config.kinds import READS, named

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
    (
        "optim.values.staleness",
        lambda c: c.optim.values.staleness and c.optim.values.update in ("dense", "in_backward"),
        lambda c: f"update: {c.optim.values.update} does not know which rows a step read",
        "use update: sparse, or staleness: false",
    ),
]


# The same of each section of `memory`: dotted keys are within it, and both functions take the config and the section.
OF_A_MEMORY: list[tuple[str, Callable[[Config, Any], bool], Callable[[Config, Any], str], str]] = [
    (
        "layers",
        lambda c, m: (m.layers is None) == (m.count is None),
        lambda c, m: "memory.count is given too" if m.count else "neither layers nor memory.count is given",
        "give one of the two, for example `layers: [5]` (and `count: null` if a base file gives it)",
    ),
    (
        "layers",
        lambda c, m: m.layers == (),
        lambda c, m: "an empty list names no layer",
        "name a layer, or write `memory: null` for a dense model",
    ),
    (
        "layers",
        lambda c, m: max(m.layers or (0,)) > c.model.layers,
        lambda c, m: (
            f"{list(c.layers_of(m))} names a layer that is not there: the model has layers 1 to {c.model.layers}"
        ),
        "name layers from 1 to model.layers",
    ),
    (
        "layers",
        lambda c, m: m.layers is not None and list(m.layers) != sorted(set(m.layers)),
        lambda c, m: f"{list(c.layers_of(m))} is not in ascending order without repeats",
        "name each layer once, in ascending order",
    ),
    (
        "count",
        lambda c, m: m.layers is None and m.count is not None and max((0, *c.layers_of(m))) > c.model.layers,
        lambda c, m: (
            f"{len(c.layers_of(m))} memories at regular intervals would fall on {list(c.layers_of(m))}, beyond layer {c.model.layers}"
        ),
        "name the layers yourself with memory.layers",
    ),
    (
        "sub_keys",
        lambda c, m: m.keys == "product" and m.sub_keys is None,
        lambda c, m: "product keys need their number of sub-keys a side",
        "write for example `sub_keys: 512` for 512^2 slots",
    ),
    (
        "slots",
        lambda c, m: m.keys == "product" and m.slots is not None,
        lambda c, m: "the slots of product keys follow from memory.sub_keys",
        "remove memory.slots",
    ),
    (
        "slots",
        lambda c, m: m.keys in ("flat", "ngram") and m.slots is None,
        lambda c, m: "flat keys need their number of slots" if m.keys == "flat" else "n-grams need rows for each head",
        "write for example `slots: 16384`",
    ),
    (
        "sub_keys",
        lambda c, m: m.keys in ("flat", "ngram") and m.sub_keys is not None,
        lambda c, m: f"{'flat keys' if m.keys == 'flat' else 'n-grams'} have no sub-keys",
        "remove memory.sub_keys",
    ),
    (
        "knn",
        lambda c, m: m.keys == "product" and m.sub_keys is not None and m.knn > m.sub_keys,
        lambda c, m: f"k = {m.knn} is more than the {m.sub_keys} sub-keys of a side",
        "choose knn <= sub_keys",
    ),
    (
        "knn",
        lambda c, m: m.keys == "flat" and m.slots is not None and m.knn > m.slots,
        lambda c, m: f"k = {m.knn} is more than the {m.size} slots",
        "choose knn <= slots",
    ),
    (
        "query.dim",
        lambda c, m: (m.keys == "product" or m.query.norm == "layer_halves") and m.query.dim % 2 != 0,
        lambda c, m: f"a query of {m.query.dim} has no two halves",
        "choose an even query size",
    ),
    (
        "share_values",
        lambda c, m: m.share_values and len(c.layers_of(m)) > 1 and c.optim.values.update == "in_backward",
        lambda c, m: "update: in_backward moves rows while other layers have yet to read the same table backwards",
        "use optim.values.update: sparse, or share_values: false",
    ),
    (
        "sub_keys",
        lambda c, m: m.keys == "tucker" and m.sub_keys is None,
        lambda c, m: "Tucker keys need their number of sub-keys a side",
        "write for example `sub_keys: 512` for 512^2 rows",
    ),
    (
        "slots",
        lambda c, m: m.keys == "tucker" and m.slots is not None,
        lambda c, m: "the slots of Tucker keys follow from memory.sub_keys and memory.expansion",
        "remove memory.slots",
    ),
    (
        "expansion",
        lambda c, m: math.isqrt(m.expansion) ** 2 != m.expansion,
        lambda c, m: f"{m.expansion} is no square number, and each side has the root of it times as many sub-keys",
        "choose 1, 4, 9 or 16",
    ),
    (
        "cores_loss",
        lambda c, m: m.keys == "tucker" and m.cores_loss > 0 and m.rank == 1,
        lambda c, m: "cores of rank 1 need no loss that draws them there",
        "choose a higher rank, or leave cores_loss out",
    ),
    (
        "expansion",
        lambda c, m: m.keys != "tucker" and (m.expansion > 1 or m.cores > 1 or m.queries_by_rank or m.cores_loss > 0),
        lambda c, m: (
            f"expansion, cores, cores_loss and queries_by_rank are settings of Tucker keys, and these are {m.keys} keys"
        ),
        "choose keys: tucker, or leave them out",
    ),
    (
        "knn",
        lambda c, m: m.keys == "tucker" and m.sub_keys is not None and m.knn > m.sub_keys_searched,
        lambda c, m: f"k = {m.knn} is more than the {m.sub_keys_searched} sub-keys of a side",
        "choose knn <= sub_keys * the root of expansion",
    ),
    (
        "query.dim",
        lambda c, m: m.keys == "tucker" and m.query.dim % (2 * m.rank if m.queries_by_rank else 2) != 0,
        lambda c, m: f"a query of {m.query.dim} has no {2 * m.rank if m.queries_by_rank else 2} equal parts",
        "choose a multiple of 2, with queries_by_rank of 2 * rank",
    ),
    (
        "values_dim",
        lambda c, m: m.cores > 1 and m.read == "rows" and m.value_width(c.model.dim) % m.cores != 0,
        lambda c, m: f"{m.cores} cores cannot weigh {m.value_width(c.model.dim)} columns of a value evenly",
        "choose a multiple of memory.cores",
    ),
    (
        "read",
        lambda c, m: m.keys == "tucker" and m.read == "experts",
        lambda c, m: "the weights of Tucker keys are for rows or for linear experts",
        "choose read: experts-linear, or rows",
    ),
    (
        "input_dim",
        lambda c, m: m.input_dim is not None and m.read != "experts-linear",
        lambda c, m: f"it is the width of a linear expert's input, and read: {m.read} has none",
        "choose read: experts-linear, or remove input_dim",
    ),
    (
        "kernels",
        lambda c, m: m.kernels == "faiss" and m.keys in ("tucker", "ngram"),
        lambda c, m: "faiss searches product and flat keys",
        "choose kernels: auto",
    ),
    (
        "place",
        lambda c, m: m.place == "before" and m.keys != "ngram",
        lambda c, m: f"before the block there is no norm, and {m.keys} keys are asked with a normalised input",
        "choose replace, beside or after",
    ),
    (
        "skip",
        lambda c, m: m.skip > 0 and m.place != "beside",
        lambda c, m: f"a memory with place: {m.place} is added where it stands",
        "choose place: beside, or leave skip out",
    ),
    (
        "skip",
        lambda c, m: m.skip > 0 and max((0, *c.layers_of(m))) <= c.model.layers < max((0, *c.layers_of(m))) + m.skip,
        lambda c, m: f"{m.skip} blocks after layer {max(c.layers_of(m))} there is none: the model has {c.model.layers}",
        "choose a smaller skip, or earlier layers",
    ),
    (
        "orders",
        lambda c, m: m.keys == "ngram" and (not m.orders or list(m.orders) != sorted(set(m.orders))),
        lambda c, m: f"{list(m.orders)} is not in ascending order without repeats, or empty",
        "name each order once, as [2, 3]",
    ),
    (
        "read",
        lambda c, m: m.keys == "ngram" and m.read != "rows",
        lambda c, m: f"n-grams give rows, not {m.read}",
        "choose read: rows",
    ),
    (
        "keys_norm",
        lambda c, m: m.keys == "ngram" and (m.keys_norm != "none" or m.keys_shared_by_heads),
        lambda c, m: "n-grams are looked up without keys",
        "leave keys_norm and keys_shared_by_heads out",
    ),
    (
        "share_values",
        lambda c, m: m.keys == "ngram" and m.share_values,
        lambda c, m: "each layer hashes n-grams to rows of its own",
        "leave share_values out",
    ),
    (
        "convolution",
        lambda c, m: m.convolution is not None and (m.keys, m.gate) != ("ngram", "engram"),
        lambda c, m: f"it follows the gate of n-grams, and these are {m.keys} keys with gate: {m.gate}",
        "choose keys: ngram with gate: engram, or leave convolution out",
    ),
    (
        "values_dim",
        lambda c, m: m.keys == "ngram" and m.gate == "none" and m.values_dim is not None,
        lambda c, m: "without a gate the rows of n-grams are summed, and are as wide as the model",
        "choose gate: engram, or leave values_dim out",
    ),
]


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
