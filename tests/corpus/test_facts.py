from collections import Counter

import numpy as np
import pytest

from pkm.corpus import facts
from pkm.corpus.batches import TrainingBatches
from pkm.corpus.facts import CUE, ages, facts_held_out, facts_in, facts_seen, when_seen
from pkm.corpus.store import open_corpus
from pkm.corpus.words import words_of
from pkm.text.vocab import UNK_ID
from tests.support.tiny import byte_level_corpus_of, corpus_of

WHO = ["Ann@@ a Lee", "Bob", "Car@@ ol", "Dan Mc@@ Coy", "Eve"]
WHERE = ["Par@@ is", "New York", "Oslo", "Rome"]
TRAIN = [
    f"The old house by the sea belonged to {WHO[i % 5]} . After the war it was sold in {WHERE[i % 4]} for {10 + i % 7} pounds ."
    for i in range(60)
]
TEST = ["The last we heard of it came from Zo@@ e . Nobody has been seen near Bern since ."] * 9


def written(text):
    """As people write it, in place of Moses tokens and their pieces."""
    return text.replace("@@ ", "").replace(" .", ".")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return open_corpus(corpus_of(tmp_path_factory.mktemp("c") / "facts", train=TRAIN, test=TEST))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    train, test = ([written(text) for text in texts] for texts in (TRAIN, TEST))
    # What begins as a statement does and goes on otherwise is another.
    more = [text.replace(" pounds", "0 pounds").replace("Oslo", "Oslow") for text in train]
    return open_corpus(byte_level_corpus_of(tmp_path_factory.mktemp("c") / "bytes", train=train + more, test=test))


def found_in(corpus, text):
    pieces = text.split()
    ids = [corpus.vocab.id(piece) if piece != "\n" else 1 for piece in pieces]

    def read(some):
        return " ".join(corpus.vocab.pieces[i] for i in some)

    found = facts_in(ids, words_of(corpus), UNK_ID)
    return [(fact.kind, read(fact.prompt), read(fact.answer), fact.cue) for fact in found]


def test_names_places_and_numbers_are_asked_as_the_rest_of_their_sentence(corpus):
    assert found_in(corpus, ". " + TRAIN[0]) == [
        ("name", "The old house by the sea belonged to", "Ann@@ a Lee", 4),
        ("place", "After the war it was sold in", "Par@@ is", 4),
        ("number", "After the war it was sold in Par@@ is for", "10", 5),
    ]


@pytest.mark.parametrize(
    "text",
    (
        "The old house by the sea belonged to Bob .",  # where the sentence begins is out of sight
        ". Oslo Rome Bob Eve Oslo Rome Bob .",  # no words in lower case before them
        ". was sold for 12 pounds .",  # too few words before them
        ". After the war it was sold in New",  # the name may go on
        ". After the war it was sold in Unheard .",  # <unk>
        ". After the unheard it was sold in Oslo .",
    ),
)
def test_what_cannot_be_asked_is_left_out(corpus, text):
    assert UNK_ID in [corpus.vocab.id("Unheard"), corpus.vocab.id("unheard")]
    assert found_in(corpus, text) == []


def found_in_text(corpus, text):
    """(kind, cue, answer) of a text that goes on after `Before.`"""
    encoder = corpus.encoder()
    [(ids, _)] = encoder.encode_batch([f"Before. {text} It goes on"])
    found = list(facts_in(ids[:-1], words_of(corpus), corpus.unknown_id))
    assert all(encoder.decode(f.prompt + f.answer).lstrip() in text for f in found)
    return [(f.kind, *(encoder.decode(part) for part in (f.prompt[-f.cue :], f.answer))) for f in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        (
            "After the war it was sold in New York.",
            [("place", " it was sold in", " New York")],
        ),
        (
            "We heard that \u201cthe shop\u201d went to Ann Lee, who paid $1,000 and later more than 2,000.",
            [("name", " shop\u201d went to", " Ann Lee"), ("number", " and later more than", " 2,000")],
        ),
        ("He told the house of Zo\u00eb O\u2019Neill.", [("name", " told the house of ", "Zo\u00eb")]),
        ("They say that it was Bob!", [("name", " say that it was", " Bob")]),
        # A title's full stop ends no sentence.
        ("Before he came Mr. Smith had often been in Rome.", [("place", " had often been in", " Rome")]),
        ("We went to see him. So did Ann.", []),  # too few words in the sentence
        ("He looked for the house in \u201cOslo\u201d.", []),  # no word in lower case before it
        ("He looked for the man of 20xx20.", [("number", " for the man of", " 20xx20")]),
    ),
)
def test_facts_of_another_tokenizer_are_found_with_punctuation_stripped(byte_level, text, expected):
    assert found_in_text(byte_level, text) == expected


def goes_on(corpus, place):
    """Whether a word goes on with the token at a place."""
    if corpus.words_are == "Moses tokens":
        return False
    return corpus.encoder().decode(corpus.train.read(place, place + 1).tolist())[:1].isalnum()


@pytest.mark.parametrize("piece", (7, 64, 1 << 21))
@pytest.mark.parametrize("steps", (1, 5, 40))
@pytest.mark.parametrize("tokenizer", ("corpus", "byte_level"))
def test_how_often_and_when_a_fact_was_seen_is_what_the_batches_held(request, tokenizer, monkeypatch, piece, steps):
    monkeypatch.setattr(facts, "PIECE", piece)
    corpus = request.getfixturevalue(tokenizer)
    context, sequences = (24, 3) if tokenizer == "corpus" else (60, 3)
    batches, words = TrainingBatches(corpus.train, context, sequences, seed=4), words_of(corpus)
    asked = facts_seen(batches, words, steps, 100, 1) + facts_held_out(corpus.test, context, words, 9, 1)
    times, last = Counter(), {}
    for step in range(steps):
        inputs, targets = batches.batch(step)
        rows = np.concatenate([inputs, targets[:, -1:]], axis=1).tolist()
        for row, window in zip(rows, batches.indices(step, 0, sequences).tolist(), strict=True):
            for fact in asked:
                statement, size = list(fact.statement), len(fact.statement)
                places = [i for i in range(len(row)) if row[i : i + size] == statement]
                held = sum(not goes_on(corpus, window * context + i + size) for i in places)
                times[fact] += held
                if held:
                    last[fact] = step
    assert sum(times.values()) > 0
    seen = when_seen(asked, batches, words, steps)
    assert [(one.times, one.last) for one in seen] == [(times[fact], last.get(fact, -1)) for fact in asked]
    assert {fact.kind for fact, one in zip(asked, seen, strict=True) if one.times == 0} == {"name", "place"}


def test_facts_are_chosen_by_the_seed_alone_and_of_every_age(corpus):
    batches = TrainingBatches(corpus.train, 24, 2, seed=4)
    once, again, other = (facts_seen(batches, words_of(corpus), 20, 12, seed) for seed in (1, 1, 2))
    assert once == again != other
    assert len({fact.statement for fact in once}) == len(once) > 3
    assert all(len(fact.prompt) >= fact.cue >= CUE for fact in once)


@pytest.mark.parametrize(
    ("steps", "expected"), ((1, [(1, 1)]), (4, [(1, 3), (4, 4)]), (20, [(1, 3), (4, 15), (16, 20)]))
)
def test_ages_cover_every_step_once(steps, expected):
    assert ages(steps) == expected
