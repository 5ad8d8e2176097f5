"""product-key-memory (lucidrains), the layer `PKM` of releases 0.0 to 0.3, in a file of it or of a model that holds it.

Its file does not tell how many slots a head reads (topk), nor that scores might go through ReLU instead of softmax: that is
not expressed here, and nothing in the file would show it.

Shapes: d width, H heads, C sub-keys a side, q query size of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pkm.errors import UserError
from pkm.inference.adapters.names import Entry, same

UNSAID = ("knn",)
MARKS = ("keys", "to_queries.weight")
"""Two names by which its layer is known."""

REFUSED = {
    "pre_layernorm.weight": "a norm before the memory",
    "output_norm.weight": "a norm of its output",
    "maybe_concat_combine.2.weight": "heads side by side, joined by a matrix, whose weights of slots are not used",
    "values.3.weight": "heads side by side, joined by a matrix, whose weights of slots are not used",
}


def settings(theirs: Mapping[str, Tensor], given: dict[str, Any], where: str) -> dict[str, Any]:
    """Arguments of pkm.ProductKeyMemory. UserError for what it cannot be."""
    for name, what in REFUSED.items():
        if name in theirs:
            raise UserError(f"{name}: {what}, which a memory here has not", where, "import one without it")
    heads, sub_keys, _, half = theirs["keys"].shape
    if "norm.fn.weight" in theirs and len(theirs["norm.fn.weight"]) != 2 * half * heads:
        what = "norm.fn: BatchNorm over the tokens of a text in place of features, as releases from 0.2 on have it"
        raise UserError(what, where, "import one of an earlier release, or with use_layernorm")
    norm = "batch" if "norm.fn.weight" in theirs else "layer_halves"
    query = {"dim": 2 * half, "norm": norm}
    return {"dim": theirs["to_queries.weight"].shape[1], "sub_keys": sub_keys, "heads": heads, "query": query}


def table(theirs: Mapping[str, Tensor], where: str) -> Sequence[Entry]:
    heads, _, _, half = theirs["keys"].shape

    def every_half(feature: Tensor) -> Tensor:
        return feature.repeat(2 * heads)

    def one_half(features: Tensor) -> list[Tensor]:
        return [features[:half]]

    entries = [*keys_and_queries(theirs, "to_queries.weight"), same("values.weight", "values.weight")]
    for name in ("weight", "bias", "running_mean", "running_var"):
        if f"norm.fn.{name}" in theirs:
            entries.append(by_heads(f"query.norm.{name}", f"norm.fn.{name}", heads, half))
        elif f"norm.{name}" in theirs:
            entries.append(Entry(f"query.norm.{name}", (f"norm.{name}",), every_half, one_half))
    return entries


def keys_and_queries(theirs: Mapping[str, Tensor], queries: str) -> list[Entry]:
    """As the author's layers have them: no bias, and sub-keys (H, C, 2, q / 2). Slots agree."""
    heads, _, _, half = theirs["keys"].shape
    return [
        by_heads("query.first.weight", queries, heads, half),
        Entry("query.first.bias", (), lambda: torch.zeros(2 * heads * half), lambda bias: []),
        Entry("keys.weight", ("keys",), lambda keys: keys.permute(0, 2, 1, 3), lambda keys: [keys.permute(0, 2, 1, 3)]),
    ]


def by_heads(ours: str, theirs: str, heads: int, half: int) -> Entry:
    """Rows, or features, of a side, then a head, there; of a head, then a side, here."""
    return Entry(
        ours,
        (theirs,),
        lambda rows: rows.unflatten(0, (2, heads, half)).transpose(0, 1).flatten(0, 2),
        lambda rows: [rows.unflatten(0, (heads, 2, half)).transpose(0, 1).flatten(0, 2)],
    )
