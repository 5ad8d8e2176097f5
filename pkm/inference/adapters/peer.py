"""PEER-pytorch (lucidrains), the layer `PEER`: slots that are experts of one hidden unit, in a file of it or of a model.

Its file does not tell how many experts a head reads, nor whether their scores went through softmax or, as by default there, ReLU,
which a memory here has not; nor the activation (gelu, if nothing else is given).

Shapes: d width, H heads, C sub-keys a side, N = C^2 experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pkm.errors import UserError
from pkm.inference.adapters.lucidrains import keys_and_queries
from pkm.inference.adapters.names import Entry, same

UNSAID = ("knn", "non_competing_scores")
MARKS = ("keys", "weight_down_embed.weight")
"""Two names by which its layer is known."""


def settings(theirs: Mapping[str, Tensor], given: dict[str, Any], where: str) -> dict[str, Any]:
    """Arguments of pkm.ProductKeyMemory; takes out of `given` what is none. UserError for what it cannot be."""
    if given.pop("non_competing_scores") is not False:
        what = "non_competing_scores: ReLU of the scores of one expert a head, which a memory here has not"
        raise UserError(what, where, "import one that was made with non_competing_scores=False, and say so")
    if "norm.gamma" in theirs:
        raise UserError(
            "norm.gamma: a norm before the layer, which a memory here has not", where, "import one without it"
        )
    heads, sub_keys, _, half = theirs["keys"].shape
    experts, dim = theirs["weight_down_embed.weight"].shape
    if experts != sub_keys**2:
        what = f"{experts} experts for {sub_keys}^2 keys: tables for each head (separate_embed_per_head)"
        raise UserError(what, where, "import one whose heads share their experts")
    query = {"dim": 2 * half, "norm": "none"}
    return {"dim": dim, "sub_keys": sub_keys, "heads": heads, "query": query, "read": "experts"}


def table(theirs: Mapping[str, Tensor], where: str) -> Sequence[Entry]:
    return [
        *keys_and_queries(theirs, "to_queries.0.weight"),
        same("read.down.weight", "weight_down_embed.weight"),
        same("values.weight", "weight_up_embed.weight"),
    ]
