"""A directory of transformers: what scripts/export.py --format hf wrote, or any LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from pkm.config.schema import Config
from pkm.errors import UserError
from pkm.files import explained, read_json
from pkm.inference.adapters import llama
from pkm.inference.adapters.found import Found, sharded, subwords_in
from pkm.inference.adapters.names import Entry, same


def find(path: Path) -> Found:
    """UserError where it is no such directory, or of a model that is nothing here."""
    described = read_json(path / "config.json")
    if described is None:
        what = "it is no directory of transformers: it holds no config.json"
        raise UserError(what, str(path), "name what scripts/export.py --format hf or save_pretrained wrote")
    kind, about = described.get("model_type"), described.get("pkm") or {}
    table: Callable[[Config], Sequence[Entry]]
    try:
        if kind == "llama":
            settings, table = llama.settings(described, str(path / "config.json")), llama.table
        elif kind == "pkm":
            settings, table = of_config_json(described), our_names
        else:
            what = f"model_type: {kind} is nothing that can be read"
            raise UserError(what, str(path / "config.json"), "give one of llama or pkm")
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"it lacks {error}", str(path / "config.json"), "copy it again from where it comes") from None
    step = about.get("step", 0)
    return Found(sharded(path), settings | kept_settings(path), table, step=step, subwords=subwords_in(path))


def kept_settings(path: Path) -> dict[str, Any]:
    """Those of the run that was exported, if they lie in the directory still."""
    file = path / "config.yaml"
    if not file.is_file():
        return {}
    with explained(file):
        kept = yaml.safe_load(file.read_text("utf-8"))
    return {key: value for key, value in kept.items() if key not in ("name", "runs")}


def our_names(config: Config) -> Sequence[Entry]:
    """PkmForCausalLM has ours."""
    import torch

    from pkm.model.transformer import Transformer

    with torch.device("meta"):
        return [same(name, name) for name in Transformer(config, 1).state_dict()]


def of_config_json(described: dict[str, Any]) -> dict[str, Any]:
    """A run's settings of a PkmForCausalLM's config.json, when nothing else is left of them."""
    experts = described["experts"]
    of_experts = None
    if experts:
        of_experts = {**next(iter(experts.values())), "at": sorted(map(int, experts))}
    model = {
        **described["block"],
        "layers": described["num_hidden_layers"],
        "dim": described["hidden_size"],
        "heads": described["num_attention_heads"],
        "kv_heads": described["num_key_value_heads"],
        "ffn": described["intermediate_size"],
        "tie_embeddings": described["tie_word_embeddings"],
        "experts": of_experts,
    }
    return {
        "corpus": {"context": described["max_position_embeddings"]},
        "model": model,
        "memory": memory_sections(described["memories"]),
    }


def memory_sections(memories: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]] | None:
    """A run's `memory:` of the memories of each block. Those of a block keep their order, which names them."""
    sections: list[tuple[dict[str, Any], list[int]]] = []
    for layer, here in sorted(memories.items(), key=lambda item: (-len(item[1]), int(item[0]))):
        for settings in here.values():
            layers = next((layers for known, layers in sections if known == settings), None)
            if layers is None:
                sections.append((settings, layers := []))
            layers.append(int(layer))
    made = []
    for settings, layers in sections:
        own = {key: value for key, value in settings.items() if key != "shares"}
        made.append({**own, "share_values": settings["shares"] is not None, "layers": sorted(layers)})
    return made or None
