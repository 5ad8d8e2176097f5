"""lm-evaluation-harness on our models. Its tasks here lie on disk, and tests/conftest.py forbids it the network."""

import importlib
import json
import math
import string
import sys
from pathlib import Path
from types import SimpleNamespace

import lm_eval.tasks
import numpy as np
import pytest
import torch

import train as program
from pkm.config.load import dump
from pkm.corpus.store import open_corpus
from pkm.corpus.writer import ShardWriter, write_manifest
from pkm.device import Compute
from pkm.evaluation.evaluate import evaluate
from pkm.evaluation.harness import HarnessModel, scored_windows
from pkm.inference.export import export
from pkm.inference.generate import generate
from pkm.inference.trained import load_trained
from pkm.text.bpe import Codes
from pkm.text.encode import Encoder
from pkm.text.vocab import EOS_ID, Vocab
from tests.support.tiny import tiny_config

CONTEXT = 16
WORDS = ["the", "cat", "dog", "sat", "on", "mat", "ran", "to", "a", "red", "blue", "hat"]
CODES = "t h 9\nth e</w> 8\na t</w> 7\nr e 6\n"


def sentences(seed, count):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, 7)).capitalize() + "." for _ in range(count)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run on text spelled in letters and a few pairs, whose test split begins with a </s>."""
    folder = tmp_path_factory.mktemp("harness")
    corpus = folder / "corpus"
    corpus.mkdir()
    (corpus / "codes").write_text(CODES)
    letters = [*string.ascii_letters, "."]
    pieces = [*letters, *(f"{letter}@@" for letter in letters), "th@@", "the", "at", "re@@"]
    vocab = Vocab(pieces, [1] * len(pieces))
    vocab.save(corpus / "vocab")
    encoder = Encoder(Codes.load(corpus / "codes"), vocab)
    shards = {}
    for split, texts in {"train": sentences(1, 300), "valid": sentences(2, 5), "test": sentences(3, 9)}.items():
        writer = ShardWriter(corpus, f"{split}-00000", vocab.size)
        if split == "test":
            writer.ids.append(EOS_ID)
        for text in texts:
            words = encoder.encode(text, writer.ids)
            writer.end_document(words=words, size=len(text))
        shards[split] = [writer.close()]
    write_manifest(corpus, shards, vocab, {"escape": False, "normalize": None}, {})
    config = tiny_config(
        corpus={"path": str(corpus), "context": CONTEXT}, runs=str(folder / "runs"), optim={"steps": 40, "batch_tokens": 512},
        evaluate={"every_steps": 20},
    )  # fmt: skip
    (folder / "c.yaml").write_text(dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", str(folder / "c.yaml")])
        assert program.main() == 0
    return config.directory


@pytest.fixture(scope="module")
def model(run):
    return HarnessModel(run, device="cpu")


def asked(*args):
    return SimpleNamespace(args=args)


def by_hand(model, context, continuation):
    """The continuation's log-probability in float64, and whether each token is the likeliest."""
    ids, first = model.tok_encode(context + continuation), len(model.tok_encode(context))
    text = torch.tensor([[EOS_ID, *ids]])
    with torch.no_grad():
        log_p = model.model.logits(model.model.hidden(text[:, :-1]))[0].double().log_softmax(1)
    scored = log_p.gather(1, text[0, 1:, None])[first:, 0]
    return float(scored.sum()), bool((log_p.argmax(1)[first:] == text[0, 1 + first :]).all())


def test_loglikelihoods_are_ours_in_the_order_asked(model):
    pairs = [
        ("The cat sat", " on"),
        ("", "The dog"),
        ("A hat", " ran to."),
        ("The", " cat"),
        ("The cat\n", "A"),
        ("A", " "),
    ]
    for pair, (total, likeliest) in zip(pairs, model.loglikelihood([asked(*pair) for pair in pairs]), strict=True):
        expected = by_hand(model, *pair)
        assert total == pytest.approx(expected[0], abs=1e-4)
        assert likeliest == expected[1]
    assert model.tok_encode("The cat\nA") == [*model.tok_encode("The cat\n"), *model.tok_encode("A")]


def test_what_the_model_would_say_is_called_greedy(model):
    said = model.generate_until([asked("The cat", {"until": ["."], "max_gen_toks": 3})])[0]
    assert said and model.loglikelihood([asked("The cat", said)])[0][1] is True


def test_a_rolling_loglikelihood_gives_our_perplexity(model, run):
    corpus = open_corpus(model.config.corpus.path)
    text = "\n".join(sentences(3, 9)) + "\n"
    (total,) = model.loglikelihood_rolling([asked(text)])
    ours = evaluate(model.model, corpus, corpus.test, model.config, Compute(torch.device("cpu"), "fp32"))
    assert ours.tokens == len(model.tok_encode(text))
    assert math.exp(-total / ours.tokens) == pytest.approx(ours.perplexity, rel=1e-6)
    assert math.exp(-total / ours.words) == pytest.approx(ours.word_perplexity, rel=1e-6)
    assert model.loglikelihood_rolling([asked("")]) == [0.0]


def test_a_continuation_longer_than_the_window_is_scored_once_each_token():
    for context, text in ((3, 40), (30, 16), (1, 17), (50, 3), (1, 1)):
        ids = list(range(context + text))
        windows = list(scored_windows(ids[:context], ids[context:], 16))
        assert [token for window, scored in windows for token in window[-scored:]] == ids[context:]
        assert all(2 <= len(window) <= 17 and scored < len(window) for window, scored in windows)
        assert len(windows) == 1 or all(scored <= 8 for _, scored in windows)


def test_generation_is_ours_and_ends_where_the_task_says(model, run):
    trained = load_trained(run, "best", ("device=cpu",))
    ours = generate(trained.model, trained.corpus.encoder(), "The cat", 12, temperature=0)[0]
    settings = {"max_gen_toks": 12, "do_sample": False}
    whole, again = model.generate_until([asked("The cat", {**settings, "until": []}), asked("The cat", settings)])
    assert "The cat" + whole == ours and again == whole and len(whole) > 6
    end = whole[4:6]
    (cut,) = model.generate_until([asked("The cat", {**settings, "until": [end]})])
    assert cut == whole[: whole.index(end)]
    sampled = {"do_sample": True, "temperature": 3.0, "max_gen_toks": 12}
    assert model.generate_until([asked("The", sampled)]) == model.generate_until([asked("The", sampled)])


def test_an_exported_model_answers_as_its_run_does(model, run, tmp_path):
    export(load_trained(run, "best", ("device=cpu",)), tmp_path / "exported")
    pairs = [asked("The cat", " sat on"), asked("A", " red hat.")]
    assert HarnessModel(tmp_path / "exported", device="cpu").loglikelihood(pairs) == model.loglikelihood(pairs)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Tasks whose questions lie beside them. The harness looks through thousands of its own: once here, not in each test."""
    folder = tmp_path_factory.mktemp("tasks")
    questions = [{"question": f"The {WORDS[i]}", "choices": [" sat", " ran"], "label": i % 2} for i in range(6)]
    (folder / "q.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(5, 4)))
    data = "dataset_path: json\ndataset_kwargs: {data_files: {test: %s}}\ntest_split: test\n"
    (folder / "cats.yaml").write_text(
        "task: cats\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: label\nmetric_list: [{metric: acc}]\n" + data % (folder / "q.jsonl")
    )
    (folder / "texts.yaml").write_text(
        "task: texts\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: word_perplexity}]\n" + data % (folder / "t.jsonl")
    )
    (folder / "gone.yaml").write_text(
        (folder / "cats.yaml").read_text().replace("cats", "gone").replace("q.jsonl", "no.jsonl")
    )
    manager = lm_eval.tasks.TaskManager(include_path=str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval.tasks, "TaskManager", lambda *_, **__: manager)
        yield folder


def go(monkeypatch, capsys, program, *arguments):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    monkeypatch.setattr("sys.argv", ["program", *map(str, arguments)])
    code = importlib.import_module(program).main()
    return code, capsys.readouterr()


def test_evaluate_scores_tasks_that_lie_on_disk(model, run, tasks, monkeypatch, capsys):
    expected = 0
    for line in (tasks / "q.jsonl").read_text().splitlines():
        question = json.loads(line)
        scores = [by_hand(model, question["question"], choice)[0] for choice in question["choices"]]
        expected += scores[question["label"]] > scores[1 - question["label"]]
    options = ("--tasks", "cats,texts", "--tasks-from", tasks, "--device", "cpu")
    code, said = go(monkeypatch, capsys, "evaluate", run, *options, "--json")
    found = json.loads(said.out[said.out.index("{") :])["results"]
    assert code == 0 and found["cats"]["acc,none"] == pytest.approx(expected / 6)
    texts = sentences(5, 4)
    total = sum(model.loglikelihood_rolling([asked(text) for text in texts]))
    assert found["texts"]["word_perplexity,none"] == pytest.approx(math.exp(-total / (4 * 7)), rel=1e-5)
    code, said = go(monkeypatch, capsys, "evaluate", run, *options, "--limit", 2)
    assert code == 0 and "| cats" in said.out and "| 2 " in said.out and "word_perplexity" in said.out


@pytest.mark.parametrize(
    ("name", "words"), (("cas", "did you mean cats"), ("gone", "could not be read")), ids=("unknown", "data missing")
)
def test_a_task_that_is_not_there_is_said(run, tasks, monkeypatch, capsys, name, words):
    code, said = go(monkeypatch, capsys, "evaluate", run, "--tasks", name, "--tasks-from", tasks, "--device", "cpu")
    assert code == 2 and words in said.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--limit", 3), "--limit: no task is named"),
        (("--tasks", ""), "--tasks: a task without a name"),
        (("--tasks", "cats,"), "--tasks: a task without a name"),
        (("--tasks", "cats", "--facts"), "--facts: --facts and --tasks each score nothing else"),
        (("--tasks", "cats", "--split", "valid"), "--split: --tasks scores no split"),
        (("--facts", "--documents", 3), "--documents: --facts scores no split"),
        (("--tasks", "cats", "--limit", 0), "--limit: 0 questions"),
        (("--tasks", "cats", "--shots", -1), "--shots: -1 examples"),
        (("--tasks", "cats", "--tasks-from", "nowhere"), "--tasks-from: there is no directory nowhere"),
    ],
)
def test_options_of_tasks_that_cannot_be_are_refused_before_anything_is_loaded(monkeypatch, capsys, options, words):
    code, said = go(monkeypatch, capsys, "evaluate", "no-run", *options)
    assert code == 2 and words in said.err


def test_the_harness_own_command_knows_our_models(run, tasks, tmp_path, monkeypatch, capsys):
    code, _ = go(
        monkeypatch, capsys, "harness", "run", "--model", "pkm", "--model_args", f"run={run}",
        "--tasks", "cats", "--include_path", tasks, "--output_path", tmp_path / "out.json",
    )  # fmt: skip
    (written,) = tmp_path.glob("out*.json")
    assert code == 0 and 0 <= json.loads(written.read_text())["results"]["cats"]["acc,none"] <= 1


def test_without_the_harness_both_programs_say_how_to_get_it(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name, arguments in (("evaluate", (run, "--tasks", "cats")), ("harness", ("ls", "tasks"))):
        code, said = go(monkeypatch, capsys, name, *arguments)
        assert code == 2 and "pip install 'pkm[eval]'" in said.err
