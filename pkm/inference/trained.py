"""A trained model, found again in its run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pkm.checkpoint.checkpoints import Checkpoints
from pkm.checkpoint.load import Loaded
from pkm.config.schema import Config, load
from pkm.corpus.store import Corpus, open_corpus
from pkm.device import Compute, decide
from pkm.distributed import dist
from pkm.errors import UserError
from pkm.files import explained
from pkm.inference.adapters.found import of_another_vocabulary
from pkm.model.transformer import Transformer, build_model, column_sharded


@dataclass(frozen=True)
class Trained:
    config: Config
    compute: Compute
    corpus: Corpus
    model: Transformer
    step: int
    directory: Path


def load_trained(directory: Path, checkpoint: str = "best", overrides: tuple[str, ...] = ()) -> Trained:
    """The model of a run at a checkpoint: `best`, `latest` or a step's number.

    `overrides` are settings that may differ from the run's own, such as `device=cpu` or `corpus.path=...`.
    Raises UserError where there is no such run, corpus or checkpoint.
    """
    file = directory / "config.yaml"
    with explained(directory):
        there = file.is_file()
    if not there:
        what = "this is not a run directory: it holds no config.yaml"
        raise UserError(what, str(directory), "name a directory below runs/")
    if any(directory.glob("model*.safetensors")):
        what = "it is no run's directory, but what scripts/export.py wrote: weights, without checkpoints"
        fix = "name the run itself, or make one of what was written with --format hf: scripts/import.py --from hf"
        raise UserError(what, str(directory), fix)
    config = load(file, overrides).config
    corpus = open_corpus(config.corpus.path)
    loaded = Checkpoints(directory / "checkpoints", keep=config.checkpoint.keep).load(checkpoint)
    refuse_another_corpus(loaded, corpus)
    model = build_model(config, corpus.vocab.size, corpus.vocab)
    for name, table in model.tables().items():
        # As training kept it (optim.values.dtype).
        table.weight.data = table.weight.data.to(loaded.dtype(f"model.{name}.weight") or table.weight.dtype)
    load_weights(model, loaded)
    compute = decide(config)
    return Trained(config, compute, corpus, model.to(compute.device).eval(), loaded.step, directory)


def refuse_another_corpus(loaded: Loaded, corpus: Corpus) -> None:
    """UserError if ids mean other words here than they did when the model was trained."""
    if "imported" in loaded.record:  # of its text nothing is known, of its subwords perhaps
        other = of_another_vocabulary(loaded.record["subwords"], corpus.path)
        if other is not None:
            what = f"the model was trained with another {other}: its ids would mean other words here"
            raise UserError(what, str(corpus.path / other), "prepare the corpus with the model's subwords")
    elif loaded.record["corpus"] != corpus.fingerprint:
        what = "the run was trained on another corpus: its ids would mean other words here"
        raise UserError(what, str(corpus.path), "give the corpus it was trained on")


def load_weights(model: Transformer, loaded: Loaded) -> None:
    """Copy a checkpoint's weights and running statistics into `model`."""
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    with dist.raise_on_all_ranks():
        loaded.copy_into(weights, column_sharded(model, weights), prefix="model.")
