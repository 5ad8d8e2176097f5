"""Configs and corpora small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from pkm.config.schema import Config, load
from pkm.corpus.store import TOKENIZER, OtherVocab, Shard
from pkm.corpus.writer import ShardWriter, write_manifest
from pkm.model.transformer import Transformer
from pkm.text.vocab import EOS_ID, SPECIALS, UNIVERSAL, UNK_ID, Vocab
from pkm.train.optim import Optimizers

VOCAB_SIZE = 50
MINIMAL = "name: a\ncorpus: {path: p, context: 64}\noptim: {steps: 5, batch_tokens: 512}\nmodel: {layers: 6, dim: 64, heads: 8}\n"
MEMORY = "memory: {layers: [5], sub_keys: 64}\n"


def loaded(tmp_path: Path, text: str, *overrides: str) -> Config:
    """The config of a file of this text, with overrides."""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load(path, overrides).config


def tiny_config(**sections: Any) -> Config:
    """2 layers of width 16 with a memory of 8^2 slots at layer 2; `sections` replace or, as dicts, are merged in."""
    base: dict[str, Any] = {
        "name": "tiny",
        "corpus": {"path": "prepared/tiny", "context": 8},
        "model": {"layers": 2, "dim": 16, "heads": 2},
        "memory": {"layers": [2], "sub_keys": 8, "heads": 2, "knn": 3, "query": {"dim": 8}},
        "optim": {
            "steps": 20,
            "batch_tokens": 64,
            "dense": {"lr": 1e-2, "warmup_steps": 5},
            "values": {"lr": 1e-2},
        },
        "evaluate": {"every_steps": 10, "batch": 4, "sample": 4},
        "checkpoint": {"every_steps": 5},
        "device": "cpu",
        "precision": "fp32",  # whatever the machine's CPU has
        "threads": 1,
    }
    return Config.model_validate(merged(base, sections))


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the settings of `over`, section by section."""
    both = dict(base)
    for key, value in over.items():
        both[key] = merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return both


def random_corpus(path: Path, documents: int = 60, seed: int = 0, unknown: int = 0) -> Path:
    """A prepared corpus at `path`: `documents` train, 4 valid and 4 test documents of 40 tokens, with a pattern to learn.

    unknown: how many tokens of the second document of each split are <unk>.
    """
    path.mkdir(parents=True)
    (path / "codes").write_text("a b 1\n")
    first = len(UNIVERSAL + SPECIALS)
    pieces = [f"w{i}" if i % 2 else f"p{i}@@" for i in range(VOCAB_SIZE - first)]
    vocab = Vocab(pieces, [1] * len(pieces))
    vocab.save(path / "vocab")
    rng = np.random.default_rng(seed)
    shards = {}
    for split, count in {"train": documents, "valid": 4, "test": 4}.items():
        writer = ShardWriter(path, f"{split}-00000", vocab.size)
        for number in range(count):
            ids = (rng.integers(0, 6) + np.arange(39) * rng.integers(1, 4)) % (vocab.size - first) + first
            if number == 1:
                ids[:unknown] = UNK_ID
            writer.ids.extend([*ids.tolist(), EOS_ID])
            writer.end_document(words=int(vocab.word_ends[ids].sum()), size=150)
        shards[split] = [writer.close()]
    write_manifest(path, shards, vocab, {"escape": False, "normalize": None}, {})
    return path


def everything(model: Transformer, optim: Optimizers) -> dict[str, Tensor]:
    """All tensors of a run: weights, running statistics, moments."""
    return {**model.state_dict(), **{f"optim.{name}": tensor for name, tensor in optim.state_tensors().items()}}


def corpus_of(path: Path, **texts: list[str]) -> Path:
    """A prepared corpus of `train`, `valid` and `test` documents, one line each, whose pieces are what spaces separate."""
    path.mkdir(parents=True)
    (path / "codes").write_text("a b 1\n")
    pieces = list(dict.fromkeys(piece for split in texts.values() for text in split for piece in text.split()))
    vocab = Vocab(pieces, [1] * len(pieces))
    vocab.save(path / "vocab")
    shards: dict[str, list[Shard]] = {"train": [], "valid": [], "test": []}
    for split, documents in texts.items():
        writer = ShardWriter(path, f"{split}-00000", vocab.size)
        for text in documents:
            ids = [vocab.id(piece) for piece in text.split()]
            writer.ids.extend([*ids, EOS_ID])
            writer.end_document(words=int(vocab.word_ends[ids].sum()), size=len(text))
        shards[split] = [writer.close()]
    write_manifest(path, shards, vocab, {"escape": False, "normalize": None}, {})
    return path


def byte_level_corpus_of(path: Path, **texts: list[str]) -> Path:
    """A prepared corpus of `train`, `valid` and `test` documents, by the byte-level tokenizer.json of tests/support/tokenizer_files.py."""
    from pkm.text.library import LibraryEncoder
    from tests.support.tokenizer_files import tokenizer_file

    path.mkdir(parents=True)
    (path / TOKENIZER).write_text(tokenizer_file("byte-level"), encoding="utf-8")
    encoder = LibraryEncoder.load(path / TOKENIZER)
    shards: dict[str, list[Shard]] = {"train": [], "valid": [], "test": []}
    for split, documents in texts.items():
        writer = ShardWriter(path, f"{split}-00000", encoder.size, encoder.unknown_id, count_words=True)
        for text in documents:
            writer.end_document(words=encoder.encode(text, writer.ids), size=len(text.encode()))
        shards[split] = [writer.close()]
    vocab = OtherVocab(encoder.size, encoder.end_id, encoder.unknown_id)
    write_manifest(path, shards, vocab, {"library": "tokenizers", "end": encoder.end}, {})
    return path
