"""Where a run may take its first weights from: another run, what scripts/export.py wrote, or a directory of transformers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from pkm.checkpoint.checkpoints import Checkpoints
from pkm.config.schema import Config, load
from pkm.errors import UserError
from pkm.inference.adapters import hugging_face
from pkm.inference.adapters.found import read_safetensors, subwords_in
from pkm.inference.adapters.names import to_ours
from pkm.inference.export import WEIGHTS


@dataclass(frozen=True)
class Source:
    """A trained model's weights.

    what        its path and step, as a message says it
    tensors     by the names of a model of `config`
    subwords    SHA-256 of what is known to say what its ids mean, by file
    """

    what: str
    config: Config
    tensors: dict[str, Tensor]
    subwords: dict[str, str]


def source(path: Path) -> Source:
    """The model in a directory; of a run its best checkpoint, or else its newest. Every rank must call it.

    UserError where there is none, or it cannot be read.
    """
    if (path / "config.json").is_file():
        return _of_transformers(path)
    if not (path / "config.yaml").is_file():
        what = "there is no trained model: it holds neither config.yaml nor config.json"
        fix = "name a run's directory, or one that scripts/export.py or transformers wrote"
        raise UserError(what, str(path), fix)
    config = load(path / "config.yaml").config
    if (path / WEIGHTS).is_file():
        return Source(str(path), config, read_safetensors([path / WEIGHTS]), subwords_in(path))
    checkpoints = path / "checkpoints"
    loaded = Checkpoints(checkpoints, keep=1).load("best" if (checkpoints / "best").exists() else "latest")
    prefix = "model."
    weights = {name: entry for name, entry in loaded.entries.items() if name.startswith(prefix)}
    tensors = {name.removeprefix(prefix): t for name, t in replace(loaded, entries=weights).tensors.items()}
    subwords = loaded.record["subwords"] if "imported" in loaded.record else subwords_in(config.corpus.path)
    return Source(f"{path} (step {loaded.step})", config, tensors, subwords)


def _of_transformers(path: Path) -> Source:
    found = hugging_face.find(path)
    context = found.settings["corpus"]["context"]
    settings = {
        **found.settings,
        "name": "source",
        "corpus": {"path": str(path), **found.settings["corpus"]},
        "optim": {"steps": 1, "batch_tokens": context},
    }
    config = Config.model_validate(settings)
    tensors = to_ours(found.table(config), dict(found.tensors), str(path))
    return Source(str(path), config, tensors, found.subwords)
