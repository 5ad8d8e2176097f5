"""Corpora whose subwords are those of a tokenizer.json: prepared, opened, scored, generated from, exported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from pkm.corpus.store import OtherVocab, open_corpus, verify
from pkm.device import Compute
from pkm.errors import UserError, UserErrors
from pkm.evaluation.evaluate import evaluate, measure_speed
from pkm.evaluation.report import report_markdown, report_record
from pkm.inference.export import WEIGHTS, export, load_exported
from pkm.inference.generate import generate
from pkm.inference.hugging_face.export import write_tokenizer
from pkm.inference.trained import load_trained
from pkm.model.transformer import build_model
from pkm.prepare import pipeline
from tests.prepare.conftest import content, made_articles, write_jsonl
from tests.support.tiny import tiny_config
from tests.support.tokenizer_files import END, tokenizer_file

CPU = Compute(torch.device("cpu"), "fp32")


@pytest.fixture
def other(prepared):
    """A corpus by a tokenizer.json of a kind: (its path, articles)."""

    def run(kind: str = "byte-level", name: str = "out", **settings):
        Path("tokenizer.json").write_text(tokenizer_file(kind))
        articles = [f"{text} \u00e9\u4e2d" for text in made_articles(60)]
        write_jsonl(Path("in.jsonl"), articles)
        subwords = {"tokenizer": "tokenizer.json", **settings.pop("subwords", {})}
        return prepared("in.jsonl", name, subwords=subwords, **settings), articles

    return run


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "wordpiece"])
def test_ids_of_every_split_are_the_librarys_and_an_end_behind_each_document(other, kind):
    path, articles = other(kind)
    corpus, alone = open_corpus(path), Tokenizer.from_str(tokenizer_file(kind))
    alone.no_truncation()
    alone.no_padding()
    assert corpus.train.documents == 53
    end_id, left = corpus.vocab.end_id, dict.fromkeys(articles)
    by_ids = {(*alone.encode(text, add_special_tokens=False).ids, end_id): text for text in articles}
    for split in (corpus.train, corpus.valid, corpus.test):
        found = [by_ids[tuple(split.document(i).tolist())] for i in range(split.documents)]
        assert split.words == sum(len(text.split()) for text in found)
        assert split.bytes == sum(len(text.encode()) for text in found)
        assert [split.words_before(i) for i in (0, 2, split.documents)] == [
            sum(len(text.split()) for text in found[:i]) for i in (0, 2, split.documents)
        ]
        for text in found:
            del left[text]
        if split is corpus.train:
            assert found == [text for text in articles if text in found]
    assert not left
    unknown = sum(int((s.read(0, 10**6) == corpus.unknown_id).sum()) for s in (corpus.train, corpus.valid, corpus.test))
    shards = [shard for split in corpus.manifest["splits"].values() for shard in split["shards"]]
    assert sum(shard["unknown"] for shard in shards) == unknown and (unknown > 0) == (kind != "byte-level")


def test_the_manifest_holds_the_tokenizer_and_the_corpus_its_file(other):
    path, _ = other()
    corpus = open_corpus(path)
    assert (path / "tokenizer.json").read_text() == tokenizer_file("byte-level")
    assert corpus.manifest["tokenizer"] == {
        "library": "tokenizers", "end": END, "end_id": 0, "unknown_id": None,
        "sha256": corpus.manifest["tokenizer"]["sha256"],
    }  # fmt: skip
    assert corpus.vocab == OtherVocab(600, 0, None) and corpus.manifest["vocab_size"] == 600
    assert not (path / "codes").exists() and not (path / "vocab").exists()
    verify(corpus)


def test_the_bytes_are_the_same_for_any_number_of_workers_and_shards_hold_their_words(other, small_pieces):
    small_pieces(3000)
    (alone, _), (two, _) = other(name="alone"), other(name="two", workers=2)
    one, several = content(alone), content(two)
    one["manifest.json"] = one["manifest.json"].replace(b'"alone"', b'"two"')
    assert one == several
    corpus = open_corpus(alone)
    assert len(list(alone.glob("train-*.words"))) == len(corpus.manifest["splits"]["train"]["shards"]) > 2
    documents = [corpus.encoder().decode(corpus.train.document(i)) for i in range(corpus.train.documents)]
    counts = np.cumsum([0, *(len(text.split()) for text in documents)])
    assert [corpus.train.words_before(i) for i in range(54)] == counts.tolist()


@pytest.mark.parametrize("name", ["tokenizer.json", "train-00000.words"])
def test_a_file_that_was_changed_later_is_named(other, name):
    path, _ = other()
    with open(path / name, "ab") as file:
        file.write(b" ")
    with pytest.raises(UserError, match=name):
        open_corpus(path)


def test_damage_within_word_counts_is_found_by_verify(other):
    path, _ = other()
    file = path / "train-00000.words"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(UserError, match=r"train-00000\.words.*hash differs"):
        verify(open_corpus(path))


def test_another_tokenizer_under_the_same_name_is_another_corpus(other):
    path, _ = other()
    before = content(path)
    with pytest.raises(UserError, match=r"another tokenizer\.json than the one there now"):
        other("wordpiece")
    assert content(path) == before


def test_an_unfinished_preparation_encodes_anew_with_another_tokenizer(other, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(pipeline, "_assemble", None)
        with pytest.raises(TypeError):
            other("wordpiece")
    assert open_corpus(other()[0]).vocab.size == 600


SETTINGS = {
    "codes beside it": ({"codes_file": "c", "vocab_file": "v"}, {}, "subwords.tokenizer.*codes_file says how"),
    "Moses' settings beside it": ({}, {"tokenizer": {"escape": True}}, "settings of Moses' tokens"),
    "an end without it": ({"tokenizer": None, "end": "</s>"}, {}, "subwords.end.*it goes with subwords.tokenizer"),
    "learning beside it": ({"learn": "byte-level", "vocab_size": 500}, {}, "with tokenizer there is nothing to learn"),
    "a size beside it": ({"vocab_size": 500}, {}, "vocab_size.*it goes with `learn: byte-level`"),
    "learning without a size": ({"tokenizer": None, "learn": "byte-level"}, {}, "vocab_size.*is not said"),
    "too small a size": (
        {"tokenizer": None, "learn": "byte-level", "vocab_size": 266},
        {},
        "the end of a document and 10 specials are 267 tokens already",
    ),
    "a special that ends documents": (
        {"tokenizer": None, "learn": "byte-level", "vocab_size": 500, "specials": ["<|endoftext|>"]},
        {},
        "subwords.specials.*ends a document",
    ),
    "more text than pairs are counted in": (
        {"tokenizer": None, "learn": "byte-level", "vocab_size": 500, "sample_megabytes": 2048},
        {},
        "sample_megabytes.*counts pairs in 32 bits",
    ),
}


@pytest.mark.parametrize("subwords, more, message", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_contradict_a_tokenizer_are_refused(tmp_path, subwords, more, message):
    from pkm.config.load import load
    from pkm.prepare.settings import PrepareConfig, impossible

    settings = {"name": "a", "sources": [{"path": "p"}], "subwords": {"tokenizer": "t.json", **subwords}, **more}
    (tmp_path / "c.yaml").write_text(json.dumps(settings))
    with pytest.raises(UserErrors, match=message):
        load(tmp_path / "c.yaml", [], PrepareConfig, impossible)


def test_a_tokenizer_that_cannot_be_used_is_refused_before_anything_is_read(prepared):
    write_jsonl(Path("in.jsonl"), made_articles(40))
    Path("bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"bad\.json: it is no tokenizer\.json"):
        prepared("in.jsonl", subwords={"tokenizer": "bad.json"})
    with pytest.raises(UserError, match=r"none\.json: no such file"):
        prepared("in.jsonl", subwords={"tokenizer": "none.json"})
    assert not Path("prepared").exists()


def test_scores_count_the_words_between_white_space_and_reports_say_so(other):
    path, _ = other()
    corpus, config = open_corpus(path), tiny_config(model={"document_mask": True, "norm": "pre"})
    model = build_model(config, corpus.vocab.size)
    whole = evaluate(model, corpus, corpus.test, config, CPU)
    assert whole.words == corpus.test.words and whole.words_are == "between white space"
    assert whole.word_loss * whole.words == pytest.approx(whole.loss * whole.tokens)
    some = evaluate(model, corpus, corpus.test, config, CPU, documents=2)
    texts = [corpus.encoder().decode(corpus.test.document(i)) for i in range(2)]
    assert some.words == sum(len(text.split()) for text in texts)
    speed = measure_speed(model, corpus, corpus.test, config, CPU, seconds=0.01)
    ratio = speed.words_per_second / speed.tokens_per_second
    assert ratio == pytest.approx(corpus.test.words / corpus.test.tokens, rel=0.01)
    text = report_markdown(report_record(config, model, 1, whole, speed), whole, speed)
    assert "perplexity per word (between white space)" in text


def test_text_of_the_id_of_padding_is_scored_as_text(other):
    """With Moses tokens id 2 is <pad>, in a tokenizer.json it may be a letter."""
    path, _ = other()
    corpus, config = open_corpus(path), tiny_config(memory={"query": {"dim": 8, "norm": "none"}})
    ids = corpus.test.read(0, corpus.test.tokens)
    model = build_model(config, corpus.vocab.size).eval()
    frequent = int(np.bincount(ids).argmax())
    swap = np.arange(corpus.vocab.size)
    swap[[2, frequent]] = frequent, 2
    renamed = path.parent / "renamed"
    renamed.mkdir()
    for file in path.iterdir():
        data = file.read_bytes()
        if file.suffix == ".bin":
            data = swap[np.frombuffer(data, "<u2")].astype("<u2").tobytes()
        (renamed / file.name).write_bytes(data)
    expected = evaluate(model, corpus, corpus.test, config, CPU)
    with torch.no_grad():
        for table in (model.tokens.weight, model.output_bias):
            table[[2, frequent]] = table[[frequent, 2]]
    found = evaluate(model, open_corpus(renamed), open_corpus(renamed).test, config, CPU)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.memories[2].percent == pytest.approx(expected.memories[2].percent)


LEARNED = {"learn": "byte-level", "vocab_size": 350, "specials": ["<mark>"]}


def test_a_byte_level_vocabulary_is_learned_from_the_training_split_alone(prepared):
    articles = made_articles(60)
    # Every article has a word of its own, the same many times: whose word is a token tells what was learned from.
    own = [
        f"{text} " + f"{chr(ord('a') + i // 26) * 2}{chr(ord('a') + i % 26) * 3}q " * 50
        for i, text in enumerate(articles)
    ]
    write_jsonl(Path("in.jsonl"), own)
    corpus = open_corpus(prepared("in.jsonl", subwords={**LEARNED, "vocab_size": 2000}))
    encoder = corpus.encoder()
    tokens = set(json.loads((corpus.path / "tokenizer.json").read_text())["model"]["vocab"])
    for split, known in ((corpus.train, True), (corpus.valid, False), (corpus.test, False)):
        words = [encoder.decode(split.document(i)).split()[-1] for i in range(split.documents)]
        assert len(set(words)) == split.documents and all(word.endswith("q") for word in words)
        assert all((f"\u0120{word}" in tokens) == known for word in words)


def test_a_learned_tokenizer_is_the_same_for_any_number_of_workers_and_gives_texts_back(prepared, small_pieces):
    small_pieces(3000)
    articles = [f"{text}\n\n \u4e2d {END} <mark>\t" for text in made_articles(60)]
    write_jsonl(Path("in.jsonl"), articles)
    one = content(prepared("in.jsonl", "alone", subwords=LEARNED))
    two = content(prepared("in.jsonl", "other", subwords=LEARNED, workers=2))
    one["manifest.json"] = one["manifest.json"].replace(b'"alone"', b'"other"')
    assert one == two
    corpus = open_corpus(Path("prepared/alone"))
    assert (corpus.vocab.size, corpus.vocab.end_id, corpus.manifest["tokenizer"]["end"]) == (350, 0, END)
    encoder, found = corpus.encoder(), []
    for split in (corpus.train, corpus.valid, corpus.test):
        ids = split.read(0, split.tokens)
        assert (ids == 0).sum() == split.documents and 1 not in ids
        found += [encoder.decode(split.document(i)) for i in range(split.documents)]
    assert sorted(found) == sorted(articles)


def test_a_sample_with_too_few_pairs_is_said(prepared, monkeypatch):
    said = []
    whole = pipeline.prepare
    monkeypatch.setattr(pipeline, "prepare", lambda config, show, say: whole(config, show, said.append))
    write_jsonl(Path("in.jsonl"), made_articles(40))
    corpus = open_corpus(prepared("in.jsonl", subwords={**LEARNED, "vocab_size": 50_000}))
    assert any(line.startswith(f"only {corpus.vocab.size:,} of 50,000 tokens") for line in said)


def test_a_run_generates_and_exports_with_the_tokenizer(other, train, tmp_path):
    path, _ = other()
    *_, directory = train(optim={"steps": 3}, corpus={"path": str(path)})
    trained = load_trained(directory, "latest")
    encoder = trained.corpus.encoder()
    prompt = {"prompt": "The minister \u4e2d", "tokens": 12, "seeds": [3, 4]}
    texts = generate(trained.model, encoder, **prompt)
    assert all(text.startswith("The minister \u4e2d") and len(text) > 14 for text in texts)
    export(trained, tmp_path / "exported")
    assert {p.name for p in (tmp_path / "exported").iterdir()} == {
        WEIGHTS,
        "config.yaml",
        "tokenizer.json",
        "encoder.json",
    }
    again = load_exported(tmp_path / "exported", ("device=cpu",))
    assert generate(again.model, again.encoder, **prompt) == texts
    (tmp_path / "exported" / "encoder.json").write_text("{")
    with pytest.raises(UserError, match=r"encoder\.json"):
        load_exported(tmp_path / "exported")


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_transformers_reads_the_tokenizer_that_is_written_for_it(other, tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    path, articles = other(kind)
    corpus, written = open_corpus(path), tmp_path / "written"
    written.mkdir()
    write_tokenizer(corpus, 32, written)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(written), corpus.encoder()
    for text, (ids, _) in zip(articles[:5], ours.encode_batch(articles[:5]), strict=True):
        assert [*theirs(text, add_special_tokens=False).input_ids, theirs.eos_token_id] == list(ids)
    assert (theirs.model_max_length, theirs.eos_token_id) == (32, corpus.vocab.end_id)
