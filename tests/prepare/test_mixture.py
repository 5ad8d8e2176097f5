"""Sources with weights: what is taken of each, and that it depends on nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.config.load import load
from pkm.corpus.store import open_corpus
from pkm.errors import UserError, UserErrors
from pkm.prepare import pipeline
from pkm.prepare.assign import Assignment, later_copies
from pkm.prepare.mixture import mix
from pkm.prepare.settings import PrepareConfig, impossible
from pkm.prepare.spool import SpoolWriter, content_hash
from tests.prepare.conftest import content, made_articles, write_jsonl


@pytest.fixture
def mixed(prepared):
    """A corpus of two files with weights."""
    first, second = made_articles(60, seed=1), [f"{text} (second)" for text in made_articles(90, seed=2)]
    write_jsonl(Path("a.jsonl"), first)
    write_jsonl(Path("b.jsonl"), second)

    def run(weights=(3, 1), name="out", **settings):
        sources = [{"path": f"{file}.jsonl", "weight": weight} for file, weight in zip("ab", weights, strict=True)]
        return prepared(None, name, sources=sources, **settings)

    return run


def of_second(corpus) -> tuple[int, int]:
    """(bytes of the first source, of the second) in all splits."""
    encoder, sizes = corpus.encoder(), [0, 0]
    for split in (corpus.train, corpus.valid, corpus.test):
        for i in range(split.documents):
            text = encoder.decode(split.document(i))
            sizes["(second)" in text] += len(text)
    return sizes[0], sizes[1]


def test_the_source_that_is_small_for_its_weight_is_whole_and_the_other_fits_its_weight(mixed):
    corpus = open_corpus(mixed())
    first, second = corpus.manifest["mixture"]
    assert (first["ran_out"], second["ran_out"]) == (True, False)
    assert first["documents"] == first["available_documents"] == 60 and second["available_documents"] == 90
    assert (first["weight"], second["weight"]) == (0.75, 0.25)
    one_article = 400 / (first["bytes"] + second["bytes"])
    assert second["share"] == pytest.approx(0.25, abs=one_article)
    assert sum(split["bytes"] for split in corpus.manifest["splits"].values()) == first["bytes"] + second["bytes"]
    found = of_second(corpus)
    assert found[1] / sum(found) == pytest.approx(second["share"], abs=0.02)
    assert corpus.manifest["dropped"] == {"not_taken": 90 - second["documents"]}
    documents = sum(split.documents for split in (corpus.train, corpus.valid, corpus.test))
    assert documents == 60 + second["documents"]


def test_only_the_ratio_of_weights_counts(mixed):
    one, two = open_corpus(mixed((3, 1), "one")), open_corpus(mixed((0.75, 0.25), "two"))
    assert one.fingerprint == two.fingerprint
    assert one.fingerprint != open_corpus(mixed((1, 3), "three")).fingerprint


def test_the_bytes_are_the_same_for_any_number_of_workers_and_goings_on(mixed, small_pieces, monkeypatch):
    small_pieces(1500)
    one = content(mixed(name="one"))
    with monkeypatch.context() as broken:
        broken.setattr(pipeline, "_encode", None)
        with pytest.raises(TypeError):
            mixed(name="two", workers=2)
    two = content(mixed(name="two", workers=2))
    two["manifest.json"] = two["manifest.json"].replace(b'"two"', b'"one"')
    assert one == two


def test_other_weights_of_an_unfinished_preparation_are_mixed_anew(mixed, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(pipeline, "_encode", None)
        with pytest.raises(TypeError):
            mixed((3, 1))
    assert open_corpus(mixed((1, 3))).fingerprint == open_corpus(mixed((1, 3), "fresh")).fingerprint


def test_copies_count_for_the_first_source_that_has_them_and_stay_out_with_it(prepared):
    articles = made_articles(80)
    write_jsonl(Path("a.jsonl"), articles)
    write_jsonl(Path("b.jsonl"), articles[:60] + [f"{text} more" for text in articles[:20]])
    sources = [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 1}]
    corpus = open_corpus(prepared(None, sources=sources))
    first, second = corpus.manifest["mixture"]
    assert (first["available_documents"], second["available_documents"], second["ran_out"]) == (80, 20, True)
    assert corpus.manifest["dropped"] == {"duplicate": 60, "not_taken": 80 - first["documents"]}
    ids = [tuple(s.document(i)) for s in (corpus.train, corpus.valid, corpus.test) for i in range(s.documents)]
    assert len(set(ids)) == len(ids) == first["documents"] + 20


def test_a_source_without_an_article_is_named(mixed):
    Path("b.jsonl").write_text("")
    with pytest.raises(UserError, match=r"sources\[1\]: it has no article that stays"):
        mixed(name="none")


TEXTS = st.binary(min_size=1, max_size=9)


@settings(max_examples=60)
@given(
    st.lists(st.lists(TEXTS, max_size=12), min_size=2, max_size=5), st.lists(st.integers(1, 9), min_size=2, max_size=2)
)
def test_what_is_taken_is_a_prefix_of_each_source_in_the_order_of_hashes(tmp_path_factory, units, weights):
    folder = tmp_path_factory.mktemp("units")
    stems, sources = [], [min(number, 1) for number in range(len(units))]
    for number, unit in enumerate(units):
        writer = SpoolWriter(folder / f"{number}")
        for text in unit:
            writer.add(text)
        writer.close()
        stems.append(folder / f"{number}")
    fixed = later_copies(stems)
    seen: set[bytes] = set()
    texts: list[list[bytes]] = [[], []]
    for unit, of, known in zip(units, sources, fixed, strict=True):
        assert [text in seen or text in unit[:i] for i, text in enumerate(unit)] == (
            known == Assignment.DUPLICATE
        ).tolist()
        texts[of] += [text for i, text in enumerate(unit) if text not in seen and text not in unit[:i]]
        seen |= set(unit)
    found = mix(stems, sources, weights, fixed)
    sizes = [sum(map(len, each)) for each in texts]
    whole = min(size * sum(weights) / weight for size, weight in zip(sizes, weights, strict=True))
    for number, one in enumerate(found):
        ordered = sorted(texts[number], key=lambda text: content_hash(text)[1])
        taken = ordered[: one.documents]
        assert one.bytes == sum(map(len, taken)) and one.bytes <= whole * weights[number] / sum(weights) + 1e-6
        if one.documents < len(ordered):
            assert one.bytes + len(ordered[one.documents]) > whole * weights[number] / sum(weights) - 1e-6
        marked = sum(int((known == 0).sum()) for known, of in zip(fixed, sources, strict=True) if of == number)
        assert marked == one.documents
    assert any(one.ran_out for one in found)


SETTINGS = {
    "one without a weight": ([{"path": "a", "weight": 1}, {"path": "b"}], {}, r"sources\[1\]\.weight: it has none"),
    "duplicates kept": (
        [{"path": "a", "weight": 1}],
        {"filters": {"duplicates": "keep"}},
        "filters.duplicates.*how often",
    ),
    "no weight": ([{"path": "a", "weight": 0}], {}, r"sources.*weight"),
}


@pytest.mark.parametrize("sources, more, message", SETTINGS.values(), ids=SETTINGS)
def test_weights_that_make_no_sense_are_refused(tmp_path, sources, more, message):
    (tmp_path / "c.yaml").write_text(json.dumps({"name": "a", "sources": sources, **more}))
    with pytest.raises(UserErrors, match=message):
        load(tmp_path / "c.yaml", [], PrepareConfig, impossible)
