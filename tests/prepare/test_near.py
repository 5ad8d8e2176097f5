"""Near-duplicates against the shares of common runs of five words, counted by hand."""

from __future__ import annotations

import json
import random
from itertools import combinations
from pathlib import Path

import pytest

from pkm.config.load import load
from pkm.corpus.store import open_corpus
from pkm.errors import UserErrors
from pkm.prepare import pipeline
from pkm.prepare.settings import PrepareConfig, impossible
from tests.prepare.conftest import content, write_jsonl
from tests.support.tokenizer_files import tokenizer_file

DROP = {"language": None, "near_duplicates": "drop"}


def words(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefghij", k=5)) for _ in range(count)]


def changed(text: list[str], places: int, seed: int) -> list[str]:
    """Some of its words by others."""
    rng = random.Random(seed)
    text = list(text)
    for place in rng.sample(range(len(text)), places):
        text[place] = f"new{''.join(rng.choices('klmnop', k=6))}"
    return text


def shared(one: str, other: str) -> float:
    """Jaccard's index of the runs of five words."""
    a, b = ({tuple(w[i : i + 5]) for i in range(len(w) - 4)} for w in (one.split(), other.split()))
    return len(a & b) / len(a | b)


@pytest.fixture
def articles():
    """30 articles alike in nothing, 12 near copies of the first ones (one word in 300 differs), 10 half copies."""
    own = [words(300, seed) for seed in range(30)]
    near = [changed(own[i], 1, 100 + i) for i in range(12)]
    half = [own[i][:150] + words(150, 200 + i) for i in range(12, 22)]
    return [" ".join(text) for text in own + near + half]


def kept(corpus) -> set[str]:
    encoder, found = corpus.encoder(), []
    for split in (corpus.train, corpus.valid, corpus.test):
        found += [" ".join(encoder.decode(split.document(i)).split()) for i in range(split.documents)]
    assert len(found) == len(set(found))
    return set(found)


def test_of_near_copies_one_stays_and_what_shares_half_of_it_stays_too(prepared, articles):
    write_jsonl(Path("in.jsonl"), articles)
    corpus = open_corpus(prepared("in.jsonl", filters=DROP))
    stay = kept(corpus)
    assert all(shared(a, b) < 0.5 for a, b in combinations(sorted(stay), 2))
    for i in range(12):
        assert len({articles[i], articles[30 + i]} & stay) == 1
    assert set(articles[12:30]) | set(articles[42:]) <= stay
    assert corpus.manifest["near_duplicates"] == {"articles": 52, "near_duplicates": 12, "share": 12 / 52}
    assert corpus.manifest["dropped"] == {"near_duplicate": 12}


def test_without_the_option_they_stay_and_the_manifest_says_nothing(prepared, articles):
    write_jsonl(Path("in.jsonl"), articles)
    corpus = open_corpus(prepared("in.jsonl"))
    assert kept(corpus) == set(articles)
    assert "near_duplicates" not in corpus.manifest and "near_duplicates" not in corpus.manifest["settings"]["filters"]


def test_copies_are_counted_apart_and_case_punctuation_and_digits_make_no_difference(prepared, articles):
    other = [f"{text.upper()}!" for text in articles[:5]]
    numbered = ["In 1998 it was " + articles[29], "In 2011 it was " + articles[29]]
    write_jsonl(Path("in.jsonl"), articles[:30] + articles[:7] + other + numbered)
    corpus = open_corpus(prepared("in.jsonl", filters=DROP))
    assert corpus.manifest["dropped"] == {"duplicate": 7, "near_duplicate": 7}
    assert corpus.manifest["near_duplicates"]["articles"] == 37
    assert sum(split["documents"] for split in corpus.manifest["splits"].values()) == 30


def test_the_bytes_are_the_same_for_any_number_of_workers_and_goings_on(prepared, articles, small_pieces, monkeypatch):
    small_pieces(4000)
    write_jsonl(Path("in.jsonl"), articles)
    one = content(prepared("in.jsonl", "one", filters=DROP))
    for broken_step in ("_near_duplicates", "_encode"):
        with monkeypatch.context() as broken:
            broken.setattr(pipeline, broken_step, None)
            with pytest.raises(TypeError):
                prepared("in.jsonl", "two", filters=DROP, workers=2)
    two = content(prepared("in.jsonl", "two", filters=DROP, workers=2))
    two["manifest.json"] = two["manifest.json"].replace(b'"two"', b'"one"')
    assert one == two


def test_the_option_set_later_looks_anew_and_unset_later_keeps_all(prepared, articles, monkeypatch):
    write_jsonl(Path("in.jsonl"), articles)
    for filters, documents in ((DROP, 40), ({"language": None}, 52)):
        with monkeypatch.context() as broken:
            broken.setattr(pipeline, "_encode", None)
            with pytest.raises(TypeError):
                prepared("in.jsonl", filters=filters)
        corpus_settings = {"language": None} if filters is DROP else DROP
        with monkeypatch.context() as broken:
            broken.setattr(pipeline, "_encode", None)
            with pytest.raises(TypeError):
                prepared("in.jsonl", filters=corpus_settings)
        corpus = open_corpus(prepared("in.jsonl", f"out{documents}", filters=filters))
        assert sum(split["documents"] for split in corpus.manifest["splits"].values()) == documents
    corpus = open_corpus(prepared("in.jsonl", filters={"language": None}))
    assert "near_duplicates" not in corpus.manifest and kept(corpus) == set(articles)


def test_ids_are_read_by_their_tokenizer(prepared, articles):
    import pyarrow as pa
    import pyarrow.parquet
    from tokenizers import Tokenizer

    Path("t.json").write_text(tokenizer_file("byte-level"))
    alone = Tokenizer.from_str(tokenizer_file("byte-level"))
    pa.parquet.write_table(pa.table({"ids": [alone.encode(text).ids for text in articles]}), "x.parquet")
    source = {"format": "parquet-ids", "column": "ids"}
    corpus = open_corpus(prepared("x.parquet", source=source, subwords={"tokenizer": "t.json"}, filters=DROP))
    assert corpus.manifest["near_duplicates"]["near_duplicates"] == 12


def test_a_mixture_is_of_what_is_left_and_short_articles_are_nobodys_copies(prepared, articles):
    write_jsonl(Path("a.jsonl"), [*articles[:30], "two words", "two words more"])
    write_jsonl(Path("b.jsonl"), articles[30:])
    sources = [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 1}]
    corpus = open_corpus(prepared(None, sources=sources, filters=DROP))
    first, second = corpus.manifest["mixture"]
    assert first["available_documents"] + second["available_documents"] == 54 - 12
    assert corpus.manifest["near_duplicates"]["near_duplicates"] == 12


SETTINGS = {
    "copies kept": ({"filters": {"near_duplicates": "drop", "duplicates": "keep"}}, "copies are the nearest"),
    "ids alone": (
        {
            "sources": [{"path": "p", "format": "nanogpt"}],
            "subwords": {"vocab_size": 9, "end_id": 1},
            "filters": {"language": None, "near_duplicates": "drop"},
        },
        "filters.near_duplicates: nothing is known of ids but their numbers",
    ),
}


@pytest.mark.parametrize("more, message", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_make_no_sense_are_refused(tmp_path, more, message):
    (tmp_path / "c.yaml").write_text(json.dumps({"name": "a", "sources": [{"path": "p"}], **more}))
    with pytest.raises(UserErrors, match=message):
        load(tmp_path / "c.yaml", [], PrepareConfig, impossible)
