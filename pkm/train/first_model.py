"""The model that a run begins with: random weights, or those of a trained model, which memories may be put into (init_from)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pkm.checkpoint.checkpoints import Checkpoints
from pkm.config.schema import Config
from pkm.corpus.store import Corpus, open_corpus
from pkm.distributed import dist
from pkm.errors import UserError
from pkm.inference.adapters.found import of_another_vocabulary
from pkm.inference.source import Source, source
from pkm.model.transformer import Transformer, build_model
from pkm.run.run import Run

MAY_DIFFER = {"dropout", "document_mask", "ffn", "experts", "rotary"}
"""Settings of `model:` that weights do not depend on, or that are compared apart."""

OF_ITS_RUN = {"layers", "count", "values_std", "kernels", "cores_loss"}
"""Settings of a memory that its weights do not depend on."""

SHOWN = 6


def first_model(run: Run, corpus: Corpus) -> Transformer:
    """As `build_model`, with what `init_from` names in it while the run has no checkpoint of its own.

    Every rank must call it. UserError where the trained model is another than this one apart from its memories.
    """
    config = run.config
    model = build_model(config, corpus.vocab.size, corpus.vocab)
    if config.init_from is None or run.checkpoints.steps():
        return model
    trained = source(config.init_from)
    with dist.raise_on_all_ranks():
        refuse_another_model(trained, config)
        for line in take(trained, model, config):
            run.say(line)
    return model


def refuse_init_from(config: Config) -> None:
    """UserError where a start would refuse what `init_from` names, as far as that depends on what is there; builds nothing."""
    if config.init_from is None or Checkpoints(config.directory / "checkpoints", keep=1).steps():
        return
    trained = source(config.init_from)
    refuse_another_model(trained, config)
    if (config.corpus.path / "manifest.json").exists():
        vocab = open_corpus(config.corpus.path).vocab
        with torch.device("meta"):
            fitting(trained, build_model(config, vocab.size, vocab).state_dict(), config)


def refuse_another_model(trained: Source, config: Config) -> None:
    """UserError that names every setting by which the same weights would compute something else, and where ids mean other words."""
    different = [
        f"{key}: {there} there, {here} here"
        for key, there, here in compared(trained.config, config)
        if there != here
    ]  # fmt: skip
    if different:
        what = "it is another model than this one: " + "; ".join(different)
        raise UserError(what, f"init_from: {trained.what}", "give this run the settings that it was trained with")
    other = of_another_vocabulary(trained.subwords, config.corpus.path)
    if other is not None:
        what = f"it was trained with another {other} than {config.corpus.path / other}: its ids would mean other words here"
        raise UserError(what, f"init_from: {trained.what}", "prepare the corpus with its subwords")


def compared(there: Config, here: Config) -> Iterable[tuple[str, Any, Any]]:
    """(dotted key, value of one, value of the other) of what weights depend on without showing it in their shapes."""
    for key in type(here.model).model_fields:
        if key == "kv_heads":
            yield f"model.{key}", there.model.kv_heads or there.model.heads, here.model.kv_heads or here.model.heads
        elif key not in MAY_DIFFER:
            yield f"model.{key}", getattr(there.model, key), getattr(here.model, key)
    yield "model.ffn", there.ffn, here.ffn
    if here.model.positions == there.model.positions == "rotary":
        yield "model.rotary", there.model.rotary.model_dump(), here.model.rotary.model_dump()
    experts = there.model.experts, here.model.experts
    yield "model.experts.active", experts[0] and experts[0].active, experts[1] and experts[1].active
    for layer in sorted({*there.memory_layers} & {*here.memory_layers}):
        others = there.memories_at(layer)
        for name, memory in here.memories_at(layer).items():
            if name in others:
                for key in set(type(memory).model_fields) - OF_ITS_RUN:
                    yield f"memory.{key} of layer {layer}", getattr(others[name], key), getattr(memory, key)


def take(trained: Source, model: Transformer, config: Config) -> list[str]:
    """Copy the weights that both have, and make the values of new memories zero; what was done, in lines.

    UserError, and nothing copied, as `fitting`.
    """
    own = model.state_dict()
    came, new, left = fitting(trained, own, config)
    with torch.no_grad():
        for name, tensor in came.items():
            own[name].copy_(tensor)
        for name in _values(config):
            if name in new:
                own[name].zero_()
    return _told(trained, config, own, came, new, left)


def fitting(trained: Source, own: dict[str, Tensor], config: Config) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """The weights that come to those of a model, `own`; the names of those that are new, and of those that are left out.

    UserError where one fits nothing and is no memory's, or has another shape.
    """
    where = f"init_from: {trained.what}"
    came = {name: trained.tensors[name] for name in own if name in trained.tensors}
    new, left = [n for n in own if n not in came], [n for n in trained.tensors if n not in own]
    for name, tensor in came.items():
        if tensor.shape != own[name].shape:
            what = f"{name} is {tuple(tensor.shape)} there, and {tuple(own[name].shape)} here"
            raise UserError(what, where, "give this run the context, the corpus and the sizes of the trained model")
    if odd := [name for name in new if not _is_of_memory(name, config)]:
        raise UserError(f"it has no {_listed(odd)}, which this model needs", where, "take a model that has it")
    if odd := [name for name in left if not _is_replaced(name, config)]:
        fix = "give this run what it has: its memories, say, at their layers"
        raise UserError(f"its {_listed(odd)} would be nothing in this model", where, fix)
    return came, new, left


def _told(
    trained: Source, config: Config, own: dict[str, Tensor], came: Iterable[str], new: list[str], left: list[str]
) -> list[str]:
    numbers = sum(own[name].numel() for name in came)
    lines = [f"init_from {trained.what}: {len(list(came))} tensors came, {numbers:,} numbers"]
    if new:
        lines.append(f"new, as seed {config.seed} makes them but for values of zero: {_listed(new)}")
    if left:
        lines.append(f"left out: {_listed(left)}")
    places = {m.place for m in config.memories for layer in config.layers_of(m) if _is_new(layer, new)}
    if left or ("after" in places and config.model.norm == "post"):
        why = "feed-forward networks are gone" if left else "the norm after a memory is new"
        lines.append(f"the first loss is not the trained model's: {why}")
    elif not any(m.values_std for m in config.memories):
        lines.append("the first loss is the trained model's")
    return lines


def _is_new(layer: int, new: list[str]) -> bool:
    return any(name.startswith(f"blocks.{layer - 1}.memory") for name in new)


def _values(config: Config) -> list[str]:
    """Names of the tables of which a memory's output is a sum, and which may begin at zero."""
    return [
        f"blocks.{layer - 1}.{name}.values.weight"
        for layer in sorted({*config.memory_layers})
        for name, memory in config.memories_at(layer).items()
        if memory.values_std is None
    ]


def _is_of_memory(name: str, config: Config) -> bool:
    """Whether it is a tensor of a memory, of what all memories of n-grams look up by, or of the norm that a memory after its block has."""
    if name == "canonical":
        return any(m.keys == "ngram" for m in config.memories)
    parts = re.match(r"blocks\.(\d+)\.(\w+)\.(\d+)?", name)
    if parts is None:
        return False
    memories = config.memories_at(int(parts[1]) + 1)
    of_norm = parts[2] == "norms" and parts[3] == "2"
    return parts[2] in memories or (of_norm and any(m.place == "after" for m in memories.values()))


def _is_replaced(name: str, config: Config) -> bool:
    """Whether it is of a feed-forward network in whose place there is a memory."""
    parts = re.match(r"blocks\.(\d+)\.feed_forward\.", name)
    if parts is None:
        return False
    return any(m.place == "replace" for m in config.memories_at(int(parts[1]) + 1).values())


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
