"""A trained model in a directory of its own: weights in one safetensors file, its config, codes and vocabulary.

    model.safetensors    every weight and running statistic, fp32 as trained
    config.yaml          the run's config
    codes  vocab  tokenizer.json    what turns text into its ids and back; or
    tokenizer.json  encoder.json    a corpus's tokenizer of the `tokenizers` library, and how it is used

The directory needs neither the run nor the corpus it came from.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from pkm.checkpoint import tensor_file
from pkm.config.load import dump
from pkm.config.schema import Config, load
from pkm.corpus.store import TOKENIZER, Corpus
from pkm.device import pick_device
from pkm.errors import UserError
from pkm.files import atomic_write, explained, publish
from pkm.inference.trained import Trained
from pkm.model.transformer import Transformer, build_model
from pkm.text.bpe import Codes
from pkm.text.encode import Encoder
from pkm.text.library import LibraryEncoder
from pkm.text.vocab import Vocab

WEIGHTS, ENCODER = "model.safetensors", "encoder.json"


@dataclass(frozen=True)
class Exported:
    config: Config
    model: Transformer
    encoder: Encoder | LibraryEncoder


def export(trained: Trained, directory: Path) -> None:
    """Write `directory` whole; UserError if it is there already and not empty, or cannot be written."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError("it is there already, and not empty", str(directory), "remove it, or name another directory")
    temporary = directory.with_name(f".{directory.name}.tmp")
    try:
        with explained(directory):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            tensor_file.write(temporary / WEIGHTS, trained.model.state_dict(), {"step": str(trained.step)})
            _write_encoder(trained.corpus, temporary)
            atomic_write(temporary / "config.yaml", dump(trained.config))
        publish(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_encoder(corpus: Corpus, directory: Path) -> None:
    corpus.encoder()  # or why there is none
    ours = isinstance(corpus.vocab, Vocab)
    for name in ("codes", "vocab") if ours else (TOKENIZER,):
        shutil.copy(corpus.path / name, directory / name)
    about = corpus.manifest["tokenizer"]
    if isinstance(corpus.vocab, Vocab):
        about = {"specials": corpus.vocab.specials, "encoder": about}
    atomic_write(directory / (TOKENIZER if ours else ENCODER), json.dumps(about, indent=1) + "\n")


def _read_encoder(directory: Path) -> Encoder | LibraryEncoder:
    file = directory / (ENCODER if (directory / ENCODER).exists() else TOKENIZER)
    try:
        with explained(file):
            about = json.loads(file.read_text())
        if file.name == ENCODER:
            return LibraryEncoder.load(directory / TOKENIZER, about["end"])
        vocab = Vocab.load(directory / "vocab", about["specials"])
        return Encoder(Codes.load(directory / "codes"), vocab, **about["encoder"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"not what was exported: {error}", str(file), "export again") from None


def load_exported(directory: Path, overrides: tuple[str, ...] = ()) -> Exported:
    """Read what `export` wrote; UserError where a file is missing or does not belong to the others."""
    config = load(directory / "config.yaml", overrides).config
    encoder = _read_encoder(directory)
    model = build_model(config, encoder.size, encoder.vocab)
    try:
        with explained(directory / WEIGHTS):
            (directory / WEIGHTS).open("rb").close()  # says what is wrong with the file better than safetensors does
            model.load_state_dict(load_file(directory / WEIGHTS))
    except (SafetensorError, RuntimeError) as error:
        what = f"the weights do not fit the config: {error}"
        raise UserError(what, str(directory / WEIGHTS), "export again") from None
    return Exported(config, model.to(pick_device(config)).eval(), encoder)
