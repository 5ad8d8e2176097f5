"""A model of another program as a run's directory: what generates, is scored, exported, and trained on from (init_from).

config.yaml    settings, as far as they are known
checkpoints/   one: weights alone, without an optimizer's state
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import yaml
from torch import Tensor

from pkm.checkpoint.checkpoints import Checkpoints
from pkm.config.load import dump
from pkm.config.schema import NAME_IN_WORDS, Config, load
from pkm.errors import UserError, UserErrors
from pkm.files import atomic_write, explained, publish
from pkm.inference.adapters import hugging_face, meta, xlm
from pkm.inference.adapters.found import Found, refuse_not_finite
from pkm.inference.adapters.names import to_ours
from pkm.model.transformer import Transformer, build_model

MODELS: dict[str, Callable[[Path], Found]] = {
    "hf": hugging_face.find,
    "xlm": xlm.find,
    "meta": meta.find,
}
"""Who reads whole models, by the format's name."""


def import_model(kind: str, path: Path, directory: Path, overrides: Sequence[str] = ()) -> Config:
    """Write a run's directory, whole, of the model in `path`; its config.

    overrides    a.b=value: settings that the file does not tell, or tells otherwise

    UserError if there is something already, if the file holds what cannot be expressed here, or does not tell a setting
    that is not given either.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError("it is there already, and not empty", str(directory), "remove it, or name another directory")
    found = MODELS[kind](path)
    temporary = directory.with_name(f".{directory.name}.tmp")
    try:
        with explained(directory):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        config = settled(found, path, directory, temporary / "config.yaml", overrides)
        model = filled(config, to_ours(found.table(config), dict(found.tensors), str(path)), str(path))
        tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        record = {"imported": kind, "subwords": found.subwords, "corpus": None, "state": {"step": found.step}}
        atomic_write(temporary / "config.yaml", dump(config))
        for name, content in found.files.items():
            atomic_write(temporary / name, content)
        Checkpoints(temporary / "checkpoints", keep=1).save(found.step, tensors, record, best=True)
        publish(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return config


def settled(found: Found, path: Path, directory: Path, file: Path, overrides: Sequence[str]) -> Config:
    """The config of what was found and what was given. UserError for what neither tells. Writes `file` for it."""
    given = {key.strip(): value for key, _, value in (override.partition("=") for override in overrides)}
    if misplaced := [key for key in ("name", "runs") if key in given]:
        what = f"{directory} says it: a run is found by its directory"
        raise UserError(
            what, f"argument '{misplaced[0]}={given[misplaced[0]]}'", "leave it out, or name another directory"
        )
    if unsaid := [key for key in found.unsaid if key not in given]:
        what = f"it does not tell {', '.join(unsaid)}"
        raise UserError(what, str(path), f"give them: {' '.join(f'{key}=...' for key in unsaid)}")
    of_corpus = found.settings.get("corpus", {})
    context = given.get("corpus.context", of_corpus.get("context", 256))
    if not str(context).isdecimal():
        context = 256  # said to be wrong below
    whole = {
        "optim": {"steps": max(found.step, 1), "batch_tokens": int(context)},  # nothing is trained
        **found.settings,
        "name": directory.name,
        "runs": str(directory.parent),
        "corpus": {"path": f"prepared/{directory.name}", **of_corpus},
    }
    atomic_write(file, yaml.safe_dump(whole, sort_keys=False))
    try:
        return load(file, overrides).config
    except UserErrors as mistakes:  # of a file that nobody will find
        named = [
            UserError(e.what, str(path) if str(file) in (e.where or "") else e.where, e.fix)
            for e in mistakes.errors
            if not e.what.startswith("name ")
        ]
        if len(named) < len(mistakes.errors):  # it came of the directory's
            named += [
                UserError("a run cannot have that name", str(directory), f"name another directory: {NAME_IN_WORDS}")
            ]
        raise UserErrors("the model's settings do not go together", named) from None


def filled(config: Config, tensors: dict[str, Tensor], where: str) -> Transformer:
    """The model of the config with these weights, in fp32. UserError where names or shapes are others."""
    model = build_model(config, len(tensors["tokens.weight"]))
    own = model.state_dict()
    for name in sorted(own.keys() | tensors.keys()):
        shapes = [tuple(one[name].shape) if name in one else None for one in (tensors, own)]
        if shapes[0] != shapes[1]:
            there, here = ("nothing" if shape is None else str(shape) for shape in shapes)
            what = f"{name} would be {there} of the file, and of these settings it is {here}"
            raise UserError(what, where, "give the settings that it was trained with")
        refuse_not_finite(name, tensors[name], where)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    return model
