"""Small corpora made up on the spot: articles with a vocabulary of their own, and short ways to prepare them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pkm.prepare import pipeline as prepare_module
from pkm.prepare.input import sources
from pkm.prepare.settings import PrepareConfig

WORDS = [
    a + b
    for a in ("", "un", "re")
    for b in ("minister", "said", "that", "bank", "talks", "rates", "Monday", "the", "a", "won't", "U.S.", "5.2", "oil")
]


def made_articles(count: int, seed: int = 0, words: int = 60) -> list[str]:
    """Different texts of a few lines each."""
    rng = random.Random(seed)
    return [
        "\n".join(
            " ".join(rng.choices(WORDS, k=rng.randint(5, words // 3))) + rng.choice([".", "?", '."'])
            for _ in range(rng.randint(1, 5))
        )
        + f" {WORDS[number % len(WORDS)]} {WORDS[number // len(WORDS)]} article."
        for number in range(count)
    ]


def write_jsonl(path: Path, articles: list[str]) -> Path:
    lines = (json.dumps({"title": "", "text": text}, ensure_ascii=False) + "\n" for text in articles)
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Cut inputs and shards far smaller than the shipped bounds would."""

    def cut(size: int) -> None:
        monkeypatch.setattr(sources, "SMALLEST_PIECE", size)
        monkeypatch.setattr(sources, "LARGEST_PIECE", size)
        monkeypatch.setattr(prepare_module, "SMALLEST_SHARD", size)
        monkeypatch.setattr(prepare_module, "LARGEST_SHARD", size)

    return cut


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Prepare with few settings: paths are relative to a directory of the test's own, workers = 1."""
    monkeypatch.chdir(tmp_path)

    def run(path: Any, name: str = "out", workers: int = 1, **settings: Any) -> Path:
        source = settings.pop("source", {})
        sources = settings.pop("sources", [{"path": path, **source}])
        config = PrepareConfig.model_validate(
            {
                "name": name,
                "sources": sources,
                "held_out": {"valid": 4, "test": 3},
                "filters": {"language": None},
                "subwords": {"codes": 200},
                "workers": workers,
                **settings,
            }
        )
        prepare_module.prepare(config, lambda stage, progress: None, lambda line: None)
        return config.directory

    return run


def content(corpus: Path) -> dict[str, bytes]:
    """Every file of a prepared corpus."""
    return {path.name: path.read_bytes() for path in sorted(corpus.iterdir())}
