"""Checkpoints of XLM (facebookresearch/XLM, the paper's own code): a causal transformer, memories in place of layers' networks.

    {"params": {...}, "model" or "encoder": state dict, "dico_id2word": ..., "dico_counts": ...}

Shapes: d width, L layers, H memory heads, C sub-keys a side, q query size of a head, K slots, V vocabulary.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pkm.config.schema import Config
from pkm.errors import UserError
from pkm.inference.adapters.found import Found, read_tensors
from pkm.inference.adapters.names import Entry, same, stacked
from pkm.text.vocab import SPECIALS, UNIVERSAL, Vocab

COUNTER = "num_batches_tracked"
QUERY = r"memories\.(\d+)_in\.query_proj\.(?:query_mlps\.)?"

# What a memory there can do that leaves no tensor behind: the setting, and what it is where it does nothing.
WITHOUT = {
    "mem_temperature": 1, "mem_score_softmax": True, "mem_score_subtract": "", "mem_score_normalize": False,
    "mem_normalize_query": False, "mem_query_residual": False, "mem_shuffle_query": False, "mem_shuffle_indices": False,
    "mem_multi_query_net": False, "mem_grouped_conv": False, "mem_input2d": False, "mem_modulo_size": -1,
    "asm": False, "n_langs": 1,
}  # fmt: skip


def find(path: Path) -> Found:
    """UserError for what is no such file, and for what a model here is not, by its name there."""
    file = read_tensors(path)
    if not isinstance(file, Mapping) or not isinstance(file.get("params"), Mapping):
        raise UserError("it is no checkpoint of XLM: it has no params", str(path), "give its checkpoint.pth")
    params: Mapping[str, Any] = file["params"]
    state: Mapping[str, Tensor] = next((file[key] for key in ("model", "encoder") if key in file), {})
    theirs = {str(name).removeprefix("module."): tensor for name, tensor in state.items()}
    refuse(params, theirs, str(path))
    if params.get("share_inout_emb", True):
        theirs.pop("pred_layer.proj.weight", None)
    theirs = {name: tensor for name, tensor in theirs.items() if not name.endswith(COUNTER)}
    vocab = vocab_file(file, str(path))
    return Found(
        theirs,
        settings(params, theirs, str(path)),
        lambda config: table(config, theirs),
        step=int(file.get("n_total_iter") or 0),
        subwords={"vocab": hashlib.sha256(vocab).hexdigest()} if vocab else {},
        files={"vocab": vocab} if vocab else {},
    )


def refuse(params: Mapping[str, Any], theirs: Mapping[str, Tensor], where: str) -> None:
    for name, nothing in WITHOUT.items():
        found = params.get(name, nothing)
        if found != nothing:
            raise UserError(f"{name}: {found} is nothing that a model here can do", where, f"import one with {nothing}")
    if params.get("mlm_steps") and not params.get("clm_steps"):
        what = "it was trained to fill in words (mlm_steps), and not to go on with a text"
        raise UserError(what, where, "import one that was trained with clm_steps")
    if after := sorted(name for name in theirs if re.match(r"memories\.\d+_after\.keys", name)):
        what = f"{after[0].removesuffix('.keys')}: a memory after a layer without a norm of its own"
        raise UserError(what, where, "import one with memories in place of layers' networks: mem_enc_positions 4")
    if inner := sorted(name for name in theirs if re.fullmatch(QUERY + r"0\.[14]\.running_mean", name)):
        what = f"{inner[0]}: BatchNorm inside a query network with a hidden layer"
        raise UserError(what, where, "import one with mem_query_layer_sizes 0,0")


def settings(params: Mapping[str, Any], theirs: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """A run's. UserError that names what the file lacks for it."""
    try:
        dim, layers = theirs["embeddings.weight"].shape[1], int(params["n_layers"])
        found: dict[str, Any] = {
            "corpus": {"context": min(params.get("bptt") or 512, len(theirs["position_embeddings.weight"]))},
            "model": {
                "layers": layers,
                "dim": dim,
                "heads": int(params["n_heads"]),
                "ffn": next((len(t) for n, t in theirs.items() if n.endswith("lin1.bias")), 4 * dim),
                "activation": "gelu" if params.get("gelu_activation") else "relu",
                "dropout": float(params.get("dropout", 0.0)),
                "tie_embeddings": bool(params.get("share_inout_emb", True)),
                "norm_eps": 1e-12,
            },
        }
        if at := sorted(int(i) for name in theirs for i in re.findall(r"^memories\.(\d+)_in\.keys$", name)):
            found["memory"] = memory(params, theirs, at)
    except KeyError as error:
        raise UserError(f"it lacks {error}", where, "give the whole file of a run of XLM") from None
    return found


def memory(params: Mapping[str, Any], theirs: Mapping[str, Tensor], at: Sequence[int]) -> dict[str, Any]:
    keys, heads = theirs[f"memories.{at[0]}_in.keys"], int(params["mem_heads"])
    flat = params.get("mem_implementation") == "flat"
    slots, half = keys.shape[-2:]
    names = [re.sub(QUERY, "", name) for name in theirs if re.match(QUERY, name) and f".{at[0]}_in." in name]
    hidden = [len(theirs[query_name(theirs, at[0], "0.0.weight")])] if "0.0.weight" in names else []
    return {
        "layers": [i + 1 for i in at],
        "place": "replace",
        "keys": "flat" if flat else "product",
        **({"slots": slots} if flat else {"sub_keys": slots}),
        "heads": heads,
        "knn": int(params["mem_knn"]),
        "query": {
            "dim": half if flat else 2 * half,
            "hidden": hidden,
            "norm": "batch" if "1.running_mean" in names else "none",
        },
    }


def query_name(theirs: Mapping[str, Tensor], layer: int, rest: str) -> str:
    """A query network's tensor; the notebook's layer leaves `query_mlps` out."""
    name = f"memories.{layer}_in.query_proj.{rest}"
    return name if name in theirs else f"memories.{layer}_in.query_proj.query_mlps.{rest}"


def table(config: Config, theirs: Mapping[str, Tensor]) -> list[Entry]:
    dim, context = config.model.dim, config.corpus.context
    entries = [
        same("tokens.weight", "embeddings.weight"),
        Entry("positions.weight", ("position_embeddings.weight",), lambda rows: rows[:context]),
        same("output_bias", "pred_layer.proj.bias"),
        *both("embedding_norm", "layer_norm_emb"),
    ]
    if not config.model.tie_embeddings:
        entries.append(same("output.weight", "pred_layer.proj.weight"))
    for i in range(config.model.layers):
        for kind in ("weight", "bias"):
            lins = [f"attentions.{i}.{x}_lin.{kind}" for x in "qkv"]
            entries.append(stacked(f"blocks.{i}.attention.qkv.{kind}", lins, [dim] * 3))
        entries += both(f"blocks.{i}.attention.out", f"attentions.{i}.out_lin")
        entries += both(f"blocks.{i}.norms.0", f"layer_norm1.{i}") + both(f"blocks.{i}.norms.1", f"layer_norm2.{i}")
        if i + 1 in config.memory_layers:
            entries += of_memory(config, i, theirs)
        else:
            entries += both(f"blocks.{i}.feed_forward.expand", f"ffns.{i}.lin1")
            entries += both(f"blocks.{i}.feed_forward.contract", f"ffns.{i}.lin2")
    return entries


def both(ours: str, theirs: str) -> list[Entry]:
    return [same(f"{ours}.{kind}", f"{theirs}.{kind}") for kind in ("weight", "bias")]


def of_memory(config: Config, layer: int, theirs: Mapping[str, Tensor]) -> list[Entry]:
    (m,) = config.memories
    ours, heads, size = f"blocks.{layer}.memory", m.heads, m.query.dim

    def query(name: str) -> str:
        return query_name(theirs, layer, name)

    def for_each_head(keys: Tensor) -> Tensor:
        """One set of keys for all heads (and sides) stands there once (mem_use_different_keys)."""
        slots = (m.slots, size) if m.keys == "flat" else (2, m.sub_keys, size // 2)
        return keys.expand(heads, *slots).clone()

    entries = [
        Entry(f"{ours}.keys.weight", (f"memories.{layer}_in.keys",), for_each_head),
        same(f"{ours}.values.weight", f"memories.{layer}_in.values.weight"),
    ]
    if not m.query.hidden:
        entries.append(same(f"{ours}.query.first.weight", query("0.weight")))
        entries.append(bias(f"{ours}.query.first.bias", query("0.bias"), heads * size, theirs))
    else:
        # One hidden layer for all heads there, one for each here: the same numbers in each.
        (hidden,) = m.query.hidden
        entries += [
            Entry(f"{ours}.query.first.weight", (query("0.0.weight"),), lambda w: w.repeat(heads, 1)),
            Entry(f"{ours}.query.first.bias", (query("0.0.bias"),), lambda b: b.repeat(heads)),
            Entry(
                f"{ours}.query.deeper.0.weight",
                (query("0.2.weight"),),
                lambda w: w.view(heads, size, hidden).transpose(1, 2),
            ),
            Entry(f"{ours}.query.deeper.0.bias", (query("0.2.bias"),), lambda b: b.view(heads, 1, size)),
        ]
    if m.query.norm == "batch":
        kinds = ("weight", "bias", "running_mean", "running_var")
        entries += [same(f"{ours}.query.norm.{kind}", query(f"1.{kind}")) for kind in kinds]
    return entries


def bias(ours: str, theirs: str, size: int, there: Mapping[str, Tensor]) -> Entry:
    """Zero where the file has none (mem_query_bias)."""
    return same(ours, theirs) if theirs in there else Entry(ours, (), lambda: torch.zeros(size))


def vocab_file(file: Mapping[str, Any], where: str) -> bytes | None:
    """fastBPE's vocabulary of the file's dictionary, for a corpus with the same ids; None if it has none."""
    words, counts = file.get("dico_id2word"), file.get("dico_counts") or {}
    if not words:
        return None
    names = [str(words[i]) for i in range(len(words))]
    marks = [*UNIVERSAL, *SPECIALS]
    if names[: len(marks)] != marks:
        found = ", ".join(names[:4])
        raise UserError(
            f"its first ids are {found}, ... and not those of XLM", where, f"they should be {', '.join(marks)}"
        )
    pieces = names[len(marks) :]
    return Vocab(pieces, [int(counts.get(piece, 0)) for piece in pieces]).to_bytes()
