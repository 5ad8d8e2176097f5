"""LlamaForCausalLM of transformers, both ways: a pre-norm block with RMSNorm, rotary positions and SwiGLU, no biases.

Shapes: d width, H heads of d / H, of which G groups share keys and values, f hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pkm.config.schema import Config
from pkm.errors import UserError
from pkm.inference.adapters.names import Entry, same, stacked

LLAMA = {
    "positions": "rotary", "norm": "pre", "norm_type": "rms", "activation": "swiglu", "bias": False,
    "embedding_norm": False, "qk_norm": False, "window": None, "logit_cap": None, "experts": None,
}  # fmt: skip
"""Settings of `model:` that are Llama's."""


def fits(config: Config) -> bool:
    """Whether the model is a Llama: the same numbers come of the same weights."""
    return config.memory is None and all(getattr(config.model, key) == value for key, value in LLAMA.items())


def table(config: Config) -> list[Entry]:
    """Their names are those of a state dict."""
    model = config.model
    entries = [same("tokens.weight", "model.embed_tokens.weight"), same("final_norm.weight", "model.norm.weight")]
    if not model.tie_embeddings:
        entries.append(same("output.weight", "lm_head.weight"))
    for i in range(model.layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        entries += [
            _qkv(config, f"{ours}.attention.qkv.weight", [f"{theirs}.self_attn.{x}_proj.weight" for x in "qkv"]),
            same(f"{ours}.attention.out.weight", f"{theirs}.self_attn.o_proj.weight"),
            same(f"{ours}.feed_forward.gate.weight", f"{theirs}.mlp.gate_proj.weight"),
            same(f"{ours}.feed_forward.expand.weight", f"{theirs}.mlp.up_proj.weight"),
            same(f"{ours}.feed_forward.contract.weight", f"{theirs}.mlp.down_proj.weight"),
            same(f"{ours}.norms.0.weight", f"{theirs}.input_layernorm.weight"),
            same(f"{ours}.norms.1.weight", f"{theirs}.post_attention_layernorm.weight"),
        ]
    return entries


def _qkv(config: Config, ours: str, theirs: list[str]) -> Entry:
    """Llama turns halves of a head; where ours turns neighbours, rows of queries and keys change places."""
    model = config.model
    size, groups = model.dim // model.heads, model.kv_heads or model.heads
    rows = [model.heads * size, groups * size, groups * size]
    if model.rotary.pairs == "halves":
        return stacked(ours, theirs, rows)

    def to_ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([neighbours(q, size), neighbours(k, size), v])

    def to_theirs(whole: Tensor) -> list[Tensor]:
        q, k, v = whole.split(rows)
        return [halves(q, size), halves(k, size), v]

    return Entry(ours, tuple(theirs), to_ours, to_theirs)


def halves(weight: Tensor, size: int) -> Tensor:
    """Rows of heads of `size` in which neighbours are a pair -> rows 0 and size / 2 of a head are one."""
    return weight.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2)


def neighbours(weight: Tensor, size: int) -> Tensor:
    """The other way."""
    return weight.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)


def config_json(config: Config, vocab_size: int) -> dict[str, Any]:
    """What transformers makes the model of."""
    model = config.model
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": config.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": model.dim // model.heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.corpus.context,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rotary.base,  # as releases before 5 read it
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary.base},
        "attention_bias": False,
        "mlp_bias": False,
    }


def settings(found: dict[str, Any], where: str) -> dict[str, Any]:
    """A run's `model:` and `corpus.context` of a config.json. UserError for what a block of ours is not."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    size = found["hidden_size"] // found["num_attention_heads"]
    for key, wrong in {
        "rope_parameters": rope.get("rope_type", rope.get("type", "default")) != "default",
        "head_dim": (found.get("head_dim") or size) != size,
        "attention_bias": bool(found.get("attention_bias")),
        "mlp_bias": bool(found.get("mlp_bias")),
        "hidden_act": found.get("hidden_act", "silu") != "silu",
    }.items():
        if wrong:
            raise UserError(f"{key}: {found.get(key)} is nothing that a block here can be", where, "give another model")
    return {
        "corpus": {"context": found["max_position_embeddings"]},
        "model": {
            **LLAMA,
            "layers": found["num_hidden_layers"],
            "dim": found["hidden_size"],
            "heads": found["num_attention_heads"],
            "kv_heads": found.get("num_key_value_heads"),
            "ffn": found["intermediate_size"],
            "rotary": {"base": rope.get("rope_theta", found.get("rope_theta", 10_000.0)), "pairs": "halves"},
            "norm_eps": found.get("rms_norm_eps", 1e-6),
            "tie_embeddings": found.get("tie_word_embeddings", False),
        },
    }
