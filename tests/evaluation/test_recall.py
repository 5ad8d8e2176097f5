import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import train as program
from pkm.config.load import dump
from pkm.corpus.batches import PAD_ID
from pkm.corpus.facts import Fact, Seen
from pkm.corpus.store import open_corpus
from pkm.device import Compute
from pkm.errors import UserError
from pkm.evaluation.recall import Asked, ask, choose, grouped, nats_saved, recall, recall_markdown
from pkm.model.transformer import build_model
from pkm.report.run_directories import read_run
from tests.support.tiny import byte_level_corpus_of, corpus_of, tiny_config

CPU = Compute(torch.device("cpu"), "fp32")
NAMES = [f"{a}{b}" for a in ("An", "Be", "Ca", "Da", "El", "Fi") for b in ("na", "ra", "la", "mo")]


def said_by(number):
    """An article whose sentence ends in a name that only having read it can tell."""
    town = f"{'abcdefgh'[number % 8]}{'qrstuvwxy'[number // 8]}ville"
    return f"The mayor of {town} is now {NAMES[number * 11 % 24]} . He was elected there ."


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("c") / "towns"
    # Six times, among others each time: alone the town tells the name, not what stands before it.
    read = [said_by(i) for times in range(6) for i in np.random.default_rng(times).permutation(48)]
    return open_corpus(corpus_of(folder, train=read, test=[said_by(i) for i in range(48, 72)]))


@pytest.fixture
def config(corpus):
    return tiny_config(corpus={"path": str(corpus.path), "context": 20}, optim={"batch_tokens": 200})


@pytest.fixture
def model(config, corpus):
    return build_model(config, corpus.vocab.size)


def ids(corpus, text):
    return tuple(corpus.vocab.id(word) for word in text.split())


def test_the_likelihood_of_an_answer_is_that_of_its_tokens_after_the_sentence(model, config, corpus):
    asked = [
        (Fact("name", ids(corpus, "of arville is now"), ids(corpus, "Anna Bera"), 4), Seen(1, 3)),
        (Fact("name", ids(corpus, "The mayor of aqville is now"), ids(corpus, "Camo"), 4), Seen(0, -1)),
    ]
    for (fact, _), one in zip(asked, ask(model, corpus, config, CPU, asked), strict=True):
        text = torch.tensor([[1, *fact.prompt, *fact.answer]])
        with torch.no_grad():
            log_p = model.eval().logits(model.hidden(text[:, :-1]))[0].double().log_softmax(1)[-len(fact.answer) :]
        expected = -sum(float(row[i]) for row, i in zip(log_p, fact.answer, strict=True))
        assert one.fact == fact
        assert one.nll == pytest.approx(expected, rel=1e-5)
        assert one.said == tuple(log_p.argmax(1).tolist())
        assert one.exact == (one.said == fact.answer)


def test_answers_of_another_tokenizer_come_after_its_end_and_hold_its_id_of_padding(config, tmp_path):
    corpus = open_corpus(byte_level_corpus_of(tmp_path / "bytes", train=["a"], test=["a"]))
    model = build_model(config, corpus.vocab.size).eval()
    fact = Fact("name", (60, PAD_ID, 61, 62), (PAD_ID, 63), 4)
    longer = Fact("name", (60, 61, 62, 64, 65, 66), (63,), 4)
    asked = ask(model, corpus, config, CPU, [(one, Seen(1, 0)) for one in (fact, longer)])
    with torch.no_grad():
        log_p = model.logits(model.hidden(torch.tensor([[corpus.vocab.end_id, 60, PAD_ID, 61, 62, PAD_ID]])))[0]
    log_p = log_p.double().log_softmax(1)
    assert corpus.vocab.end_id == 0
    assert asked[0].nll == pytest.approx(-float(log_p[-2, PAD_ID] + log_p[-1, 63]), rel=1e-5)


def test_a_model_that_read_facts_over_and_over_knows_them_and_not_those_it_never_read(train, corpus):
    shape = {"corpus": {"path": str(corpus.path), "context": 52}, "optim": {"steps": 200, "batch_tokens": 208}}
    trained, _, state, _ = train(
        **shape,
        model={"dim": 64, "heads": 4, "positions": "rotary", "norm": "pre"},
        evaluate={"every_steps": 1000},
        checkpoint={"every_steps": 1000},
    )
    config = tiny_config(**shape)
    known = recall(trained, corpus, config, CPU, state.step, 60)
    assert known.held_out == "test" and known.step == 200
    assert min(known.groups[name].facts for name in ("never", "more often")) >= 5
    assert known.groups["more often"].exact > 60 > 30 > known.groups["never"].exact
    assert known.groups["more often"].nll < known.groups["never"].nll - 2
    assert known.examples and "is now" in known.examples[0]["sentence"]
    text = recall_markdown(known)
    assert "| never (test split)" in text and "read once" not in text


def test_the_same_facts_are_asked_every_time_and_numbers_are_of_a_step(model, config, corpus):
    first, again, later = (recall(model, corpus, config, CPU, step, 30) for step in (2, 2, 4))
    assert first == again
    assert first.asked == sum(g.facts for name, g in first.groups.items() if name in ("never", "once", "more often"))
    assert first.groups["once"].facts == sum(g.facts for name, g in first.groups.items() if name.endswith("steps ago"))
    assert later.groups["once"] != first.groups["once"]
    json.dumps(first.record())


def test_a_third_each_is_never_read_read_once_and_read_more_often_evenly_over_ages_and_times(corpus):
    def some(times, last, count):
        return [(Fact("name", (len(str(times)), i, last), (i,), 2), Seen(times, last)) for i in range(count)]

    candidates = some(0, -1, 50) + some(1, 99, 3) + some(1, 90, 50) + some(1, 60, 50) + some(2, 80, 50) + some(9, 80, 4)
    chosen = choose(candidates, 100, 60, seed=0)
    groups, _ = grouped(ask_nothing(chosen), 100)
    assert {name: group.facts for name, group in groups.items()} == {
        "never": 20, "once": 20, "more often": 20, "2-3 times": 16, "8-15 times": 4,
        "1-3 steps ago": 3, "4-15 steps ago": 9, "16-63 steps ago": 8,
    }  # fmt: skip


def test_a_model_that_finds_every_token_as_likely_has_saved_nothing_by_reading(corpus):
    lengths = [(0, 3), (0, 1), (1, 2), (2, 1), (2, 1), (5, 2)]  # how often read, tokens of the answer
    asked = [
        Asked(Fact("name", (1, 2, 3, i), (4,) * tokens, 4), Seen(times, times - 1), tokens * 2.5, False, ())
        for i, (times, tokens) in enumerate(lengths)
    ]
    groups, _ = grouped(asked, 9)
    record = {"groups": {name: asdict(group) for name, group in groups.items()}}
    assert nats_saved(record) == pytest.approx(0, abs=1e-12)
    assert groups["never"].nll > groups["more often"].nll
    record["groups"]["more often"]["nll_per_token"] -= 0.75
    assert nats_saved(record) == pytest.approx(0.75)
    del record["groups"]["never"]
    assert nats_saved(record) is None


def ask_nothing(chosen):
    return [Asked(fact, seen, 1.0, False, ()) for fact, seen in chosen]


def test_a_model_that_has_read_nothing_and_a_corpus_without_facts_are_refused(model, config, corpus, tiny_corpus_path):
    with pytest.raises(UserError, match="has read nothing"):
        recall(model, corpus, config, CPU, 0, 10)
    plain = open_corpus(tiny_corpus_path)
    with pytest.raises(UserError, match="no names, places or numbers"):
        recall(build_model(config, plain.vocab.size), plain, config, CPU, 3, 10)


def test_a_run_reports_its_recall_and_evaluate_keeps_it_in_the_run(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(program.__file__).parent / "scripts"))
    import evaluate as score

    file = tmp_path / "c.yaml"
    file.write_text(
        dump(tiny_config(corpus={"path": str(corpus.path), "context": 20}, optim={"batch_tokens": 200, "steps": 6}, runs=str(tmp_path / "runs")))
    )  # fmt: skip
    directory = tmp_path / "runs" / "tiny"

    def go(main, *arguments):
        monkeypatch.setattr("sys.argv", ["program", *map(str, arguments)])
        code = main()
        return code, capsys.readouterr()

    assert go(program.main, file, "evaluate.facts=30")[0] == 0
    reported = json.loads((directory / "report.json").read_text())["facts"]
    assert (
        reported["groups"]["more often"]["facts"] > 0 and "## Recall of facts" in (directory / "report.md").read_text()
    )
    assert read_run(directory, "a").facts == reported
    code, said = go(score.main, directory, "--facts", "30", "--json", "--checkpoint", reported["step"])
    assert code == 0 and json.loads(said.out) == reported == json.loads((directory / "facts.json").read_text())
    code, said = go(score.main, directory, "--facts", "12", "--checkpoint", "latest")
    assert code == 0 and "## Recall of facts" in said.out and read_run(directory, "a").facts["asked"] <= 12
    code, said = go(score.main, directory, "--facts", "0")
    assert code == 2 and "--facts" in said.err
