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
    if described is None and (path / "config.json").is_file():
        raise UserError("it is no JSON object", str(path / "config.json"), "copy it again from where it comes")
    if described is None:
        what = "it is no directory of transformers: it holds no config.json"
        raise UserError(what, str(path), "name what scripts/export.py --format hf or save_pretrained wrote")
    kind, about, tensors = described.get("model_type"), described.get("pkm") or {}, sharded(path)
    table: Callable[[Config], Sequence[Entry]]
    try:
        if kind == "llama":
            settings, table = llama.settings(described, str(path / "config.json")), llama.table
        elif kind == "pkm":
            names = [same(name, name) for name in tensors]
            settings, table = of_config_json(described), lambda config: names
        else:
            what = f"model_type: {kind} is nothing that can be read"
            raise UserError(what, str(path / "config.json"), "give one of llama or pkm")
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"it lacks {error}", str(path / "config.json"), "copy it again from where it comes") from None
    step = about.get("step", 0)
    return Found(tensors, settings | kept_settings(path), table, step=step, subwords=subwords_in(path))


def kept_settings(path: Path) -> dict[str, Any]:
    """Those of the run that was exported, if they lie in the directory still."""
    file = path / "config.yaml"
    if not file.is_file():
        return {}
    try:
        with explained(file):
            kept = yaml.safe_load(file.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        kept = None
    if not isinstance(kept, dict):
        raise UserError("it is damaged", str(file), "copy it again, or remove it: config.json says what is needed")
    return {key: value for key, value in kept.items() if key not in ("name", "runs")}


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
    """A run's `memory:` of the memories of each block."""
    sections: dict[int, dict[str, Any]] = {}
    for layer in sorted(memories, key=int):
        for settings in memories[layer].values():
            own = {key: value for key, value in settings.items() if key not in ("section", "rows")}
            sections.setdefault(settings["section"], {**own, "layers": []})["layers"].append(int(layer))
    return [sections[number] for number in sorted(sections)] or None
