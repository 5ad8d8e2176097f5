"""Checkpoints of Meta's memory code (facebookresearch/memory, built on lingua): a Llama whose layers may hold a Memory+ layer.

    consolidated/consolidated.pth    {"model": state dict}, and params.json beside it

A folder of torch's distributed checkpoint (.distcp, .metadata) is not read: its .metadata is a pickle that runs code.

Shapes: d width, H memory heads, C sub-keys a side, q query size of a head, K slots.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pkm.config.schema import Config
from pkm.errors import UserError
from pkm.files import read_json
from pkm.inference.adapters.found import Found, read_tensors
from pkm.inference.adapters.llama import LLAMA
from pkm.inference.adapters.names import Entry, same, stacked

CONSOLIDATED = "consolidated.pth"


def find(path: Path) -> Found:
    """UserError for what is no such file, and for what a model here is not, by its name there."""
    path = consolidated(path)
    file = read_tensors(path)
    state = file.get("model", file) if isinstance(file, Mapping) else {}
    theirs = {str(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    if "tok_embeddings.weight" not in theirs:
        what = "it is no checkpoint of Meta's memory code: it has no tok_embeddings.weight"
        raise UserError(what, str(path), f"give {CONSOLIDATED} of a run of it")
    at = memory_layers(theirs)
    shared = share(theirs, at)
    for layer in at:  # what the variant with experts has and does not use
        if f"layers.{layer}.feed_forward.values_u.weight" in theirs:
            for name in ("value_proj", "swilu_projection"):
                for kind in ("weight", "bias"):
                    theirs.pop(f"layers.{layer}.feed_forward.{name}.{kind}", None)
    settings, unsaid = described(theirs, read_json(path.parent / "params.json") or {}, at, shared)
    return Found(theirs, settings, lambda config: table(config, theirs), unsaid=unsaid)


def consolidated(path: Path) -> Path:
    """The one file of a run's checkpoint. UserError for a distributed one."""
    if not path.is_dir():
        return path
    for file in (path / CONSOLIDATED, path / "consolidated" / CONSOLIDATED):
        if file.is_file():
            return file
    what = f"there is no {CONSOLIDATED} in it, and a distributed checkpoint's .metadata is a pickle that runs code"
    raise UserError(what, str(path), "make it one file where it comes from (torch.distributed.checkpoint.format_utils)")


def memory_layers(theirs: Mapping[str, Tensor]) -> list[int]:
    return sorted(int(i) for name in theirs for i in re.findall(r"^layers\.(\d+)\.feed_forward\.keys$", name))


def share(theirs: dict[str, Tensor], at: Sequence[int]) -> bool:
    """Whether several memories read one table, which then stays under the first one's name alone."""
    shared = False
    for name in ("values.weight", "values_u.weight", "values_v.weight"):
        tables = {layer: theirs.get(f"layers.{layer}.feed_forward.{name}") for layer in at}
        first, *others = tables.values() if at else [None]
        if first is None or not others:
            continue
        if all(other is None or (other.shape == first.shape and torch.equal(other, first)) for other in others):
            shared = True
            for layer in at[1:]:
                theirs.pop(f"layers.{layer}.feed_forward.{name}", None)
    return shared


def described(
    theirs: Mapping[str, Tensor], params: Mapping[str, Any], at: Sequence[int], shared: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A run's settings, and the dotted keys of those that neither the tensors nor params.json tell."""
    dim = theirs["tok_embeddings.weight"].shape[1]
    said = {
        "model.heads": nested(params, "n_heads"),
        "model.rotary.base": nested(params, "rope_theta"),
        "corpus.context": nested(params, "seq_len") or nested(params, "max_seqlen"),
        **({"memory.knn": nested(params, "mem_knn")} if at else {}),
    }
    kv_rows = len(theirs.get("layers.0.attention.wk.weight", torch.empty(dim)))
    heads, kv_heads = said["model.heads"], None
    if kv_rows != dim:
        kv_heads = kv_rows * heads // dim if heads else None
        said["model.kv_heads"] = kv_heads
    layers = {int(i) for name in theirs for i in re.findall(r"^layers\.(\d+)\.", name)}
    ffn = next((len(tensor) for name, tensor in theirs.items() if name.endswith("feed_forward.w1.weight")), None)
    settings: dict[str, Any] = {
        "corpus": {"context": said["corpus.context"] or 1},
        "model": {
            **LLAMA,
            "layers": max(layers, default=0) + 1,
            "dim": dim,
            "heads": heads or 1,
            "kv_heads": kv_heads,
            "ffn": ffn,
            "rotary": {"pairs": "neighbours", "base": said["model.rotary.base"] or 10_000.0},
            "norm_eps": nested(params, "norm_eps") or 1e-5,
            "tie_embeddings": "output.weight" not in theirs,
        },
    }
    if at:
        settings["memory"] = memory(theirs, at, shared) | {"knn": said["memory.knn"] or 1}
    return settings, tuple(key for key, value in said.items() if value is None)


def memory(theirs: Mapping[str, Tensor], at: Sequence[int], shared: bool) -> dict[str, Any]:
    name = f"layers.{at[0]}.feed_forward"
    experts = f"{name}.values_u.weight" in theirs
    slots, width = theirs[f"{name}.{'values_v' if experts else 'values'}.weight"].shape
    sub_keys, (rows, half) = math.isqrt(slots), theirs[f"{name}.keys"].shape
    return {
        "layers": [layer + 1 for layer in at],
        "place": "replace",
        "sub_keys": sub_keys,
        "heads": max(rows // (2 * sub_keys), 1),
        "query": {"dim": 2 * half, "norm": "none"},
        "read": "experts" if experts else "rows",
        "values_dim": None if width == theirs["tok_embeddings.weight"].shape[1] else width,
        "gate": "silu" if f"{name}.swilu_projection.weight" in theirs else "none",
        "share_values": shared,
    }


def nested(tree: Any, key: str) -> Any:
    """The first value of that name in a tree of settings that is not null."""
    if not isinstance(tree, Mapping):
        return None
    if tree.get(key) is not None:
        return tree[key]
    return next((found for child in tree.values() if (found := nested(child, key)) is not None), None)


def table(config: Config, theirs: Mapping[str, Tensor]) -> list[Entry]:
    model = config.model
    kv = (model.kv_heads or model.heads) * model.dim // model.heads
    entries = [same("tokens.weight", "tok_embeddings.weight"), same("final_norm.weight", "norm.weight")]
    if not model.tie_embeddings:
        entries.append(same("output.weight", "output.weight"))
    for i in range(model.layers):
        ours, there = f"blocks.{i}", f"layers.{i}"
        parts = [f"{there}.attention.w{x}.weight" for x in "qkv"]
        entries += [
            stacked(f"{ours}.attention.qkv.weight", parts, [model.dim, kv, kv]),
            same(f"{ours}.attention.out.weight", f"{there}.attention.wo.weight"),
            same(f"{ours}.norms.0.weight", f"{there}.attention_norm.weight"),
            same(f"{ours}.norms.1.weight", f"{there}.ffn_norm.weight"),
        ]
        if i + 1 in config.memory_layers:
            entries += of_memory(config, i, first=i + 1 == config.memory_layers[0])
        else:
            names = {"gate": "w1", "expand": "w3", "contract": "w2"}
            entries += [
                same(f"{ours}.feed_forward.{here}.weight", f"{there}.feed_forward.{name}.weight")
                for here, name in names.items()
            ]
    return entries


def of_memory(config: Config, layer: int, first: bool) -> list[Entry]:
    """first: of the memories, which has the tables where they share them."""
    (m,) = config.memories
    ours, there, half = f"blocks.{layer}.memory", f"layers.{layer}.feed_forward", m.query.dim // 2
    assert m.sub_keys is not None
    shape = m.heads, 2, m.sub_keys, half
    entries = [
        Entry(f"{ours}.keys.weight", (f"{there}.keys",), lambda k: k.view(shape), lambda k: [k.flatten(0, 2)]),
        same(f"{ours}.query.first.weight", f"{there}.query_proj.query_mlps.0.weight"),
        same(f"{ours}.query.first.bias", f"{there}.query_proj.query_mlps.0.bias"),
    ]
    if m.read == "rows" and (first or not m.share_values):
        entries.append(same(f"{ours}.values.weight", f"{there}.values.weight"))
    if m.read == "experts" and (first or not m.share_values):
        entries.append(same(f"{ours}.read.down.weight", f"{there}.values_u.weight"))
        entries.append(same(f"{ours}.values.weight", f"{there}.values_v.weight"))
    if m.gate == "silu":
        for kind in ("weight", "bias"):
            entries.append(same(f"{ours}.output.gate.{kind}", f"{there}.swilu_projection.{kind}"))
            entries.append(same(f"{ours}.output.project.{kind}", f"{there}.value_proj.{kind}"))
    return entries
