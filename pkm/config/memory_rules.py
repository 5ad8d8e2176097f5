"""Combinations of settings that cannot be within one `memory:` section."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

# As in pkm.config.rules.
Config = Any
# (key in its section, does it apply?, what is wrong, how to fix it), of a config and a section of it
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
