from collections import Counter

import numpy as np
import pytest

from pkm.corpus import facts
from pkm.corpus.batches import TrainingBatches
from pkm.corpus.facts import CUE, ages, facts_held_out, facts_in, facts_seen, when_seen
from pkm.corpus.store import open_corpus
from pkm.text.vocab import UNK_ID
from tests.support.tiny import corpus_of

WHO = ["Ann@@ a Lee", "Bob", "Car@@ ol", "Dan Mc@@ Coy", "Eve"]
WHERE = ["Par@@ is", "New York", "Oslo", "Rome"]
TRAIN = [
    f"The old house by the sea belonged to {WHO[i % 5]} . After the war it was sold in {WHERE[i % 4]} for {10 + i % 7} pounds ."
    for i in range(60)
]
TEST = ["The last we heard of it came from Zo@@ e . Nobody has been seen near Bern since ."] * 9


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return open_corpus(corpus_of(tmp_path_factory.mktemp("c") / "facts", train=TRAIN, test=TEST))


def found_in(corpus, text):
    pieces = text.split()
    ids = [corpus.vocab.id(piece) if piece != "\n" else 1 for piece in pieces]

    def read(some):
        return " ".join(corpus.vocab.pieces[i] for i in some)

    return [(fact.kind, read(fact.prompt), read(fact.answer), fact.cue) for fact in facts_in(ids, corpus.vocab)]


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


@pytest.mark.parametrize("piece", (7, 64, 1 << 21))
@pytest.mark.parametrize("steps", (1, 5, 40))
def test_how_often_and_when_a_fact_was_seen_is_what_the_batches_held(corpus, monkeypatch, piece, steps):
    monkeypatch.setattr(facts, "PIECE", piece)
    context, sequences = 24, 3
    batches = TrainingBatches(corpus.train, context, sequences, seed=4)
    asked = facts_seen(batches, corpus.vocab, steps, 100, 1) + facts_held_out(corpus.test, context, corpus.vocab, 9, 1)
    times, last = Counter(), {}
    for step in range(steps):
        inputs, targets = batches.batch(step)
        for row in np.concatenate([inputs, targets[:, -1:]], axis=1).tolist():
            for fact in asked:
                statement = list(fact.statement)
                held = sum(row[i : i + len(statement)] == statement for i in range(len(row)))
                times[fact] += held
                if held:
                    last[fact] = step
    assert sum(times.values()) > 0
    seen = when_seen(asked, batches, steps)
    assert [(one.times, one.last) for one in seen] == [(times[fact], last.get(fact, -1)) for fact in asked]
    assert {fact.kind for fact, one in zip(asked, seen, strict=True) if one.times == 0} == {"name", "place"}


def test_facts_are_chosen_by_the_seed_alone_and_of_every_age(corpus):
    batches = TrainingBatches(corpus.train, 24, 2, seed=4)
    once, again, other = (facts_seen(batches, corpus.vocab, 20, 12, seed) for seed in (1, 1, 2))
    assert once == again != other
    assert len({fact.statement for fact in once}) == len(once) > 3
    assert all(len(fact.prompt) >= fact.cue >= CUE for fact in once)


@pytest.mark.parametrize(
    ("steps", "expected"), ((1, [(1, 1)]), (4, [(1, 3), (4, 4)]), (20, [(1, 3), (4, 15), (16, 20)]))
)
def test_ages_cover_every_step_once(steps, expected):
    assert ages(steps) == expected
