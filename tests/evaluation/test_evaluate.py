import csv
import importlib
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from pkm.config.load import dump
from pkm.corpus.store import open_corpus
from pkm.device import Compute
from pkm.evaluation.evaluate import Speed, evaluate, measure_speed
from pkm.evaluation.report import report_markdown, report_record
from pkm.files import json_text
from pkm.model.transformer import build_model
from pkm.report import compare
from pkm.report.run_directories import read_run
from pkm.run.status import read_status
from pkm.train.log_lines import valid_line
from tests.support.tiny import VOCAB_SIZE, random_corpus, tiny_config

CPU = Compute(torch.device("cpu"), "fp32")
SPEED = Speed(1.0, 1.0, "cpu", "fp32", 4, 8)


@pytest.fixture
def corpus(tiny_corpus_path):
    return open_corpus(tiny_corpus_path)


@pytest.fixture
def model():
    return build_model(tiny_config(), VOCAB_SIZE)


def nll_token_by_token(model, ids, context):
    """Total in nats, from windows cut by hand, in float64."""
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, context):
            window = torch.from_numpy(ids[start : start + context + 1])
            log_p = model.logits(model.hidden(window[None, :-1]))[0].double().log_softmax(-1)
            total -= float(log_p.gather(1, window[1:, None]).sum())
    return total


def test_perplexities_are_those_of_the_whole_split(model, corpus):
    ids = corpus.test.read(0, corpus.test.tokens)
    nll = nll_token_by_token(model.eval(), ids, 8)
    words = corpus.test.words
    measured = evaluate(model, corpus, corpus.test, tiny_config(), CPU)
    assert measured.tokens == len(ids) - 1
    assert measured.words == words
    assert measured.perplexity == pytest.approx(math.exp(nll / (len(ids) - 1)), rel=1e-5)
    assert measured.word_perplexity == pytest.approx(math.exp(nll / words), rel=1e-5)
    assert measured.bits_per_byte == pytest.approx(nll / math.log(2) / corpus.test.bytes, rel=1e-5)


def test_usage_and_kl_follow_the_papers_definition(model, corpus):
    """Paper 4.2: z' = sum over tokens of w(x), z = z'/|z'|; usage = #{z != 0}/K, KL = log K + sum z log z."""
    memory = model.eval().blocks[1].memory
    memory.record = True
    ids = corpus.test.read(0, corpus.test.tokens)
    z = np.zeros(64)
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 8):
            model.hidden(torch.from_numpy(ids[start : start + 8][: len(ids) - 1 - start])[None])
            indices, weights, _ = memory.selection
            np.add.at(z, indices.numpy().ravel(), weights.double().numpy().ravel())
    memory.record = False
    z /= z.sum()
    read = z[z > 0]
    measured = evaluate(model, corpus, corpus.test, tiny_config(), CPU).memories[2]
    assert measured.percent == pytest.approx(100 * len(read) / 64)
    assert measured.kl == pytest.approx(math.log(64) + float((read * np.log(read)).sum()), abs=1e-6)


def test_the_batch_size_does_not_change_the_numbers(model, corpus):
    one, many = (evaluate(model, corpus, corpus.test, tiny_config(evaluate={"batch": b}), CPU) for b in (1, 7))
    assert one.loss == pytest.approx(many.loss, rel=1e-5)
    assert one.memories[2].kl == pytest.approx(many.memories[2].kl, abs=1e-6)


def test_a_batch_holds_no_more_windows_than_the_text_has(model, corpus):
    config = tiny_config(evaluate={"batch": 10**9})
    speed = measure_speed(model, corpus, corpus.test, config, CPU, seconds=0.0)
    assert speed.batch_windows == 20  # 4 documents of 40 tokens in windows of 8
    assert evaluate(model, corpus, corpus.test, config, CPU).tokens == 159


def test_a_stride_scores_the_same_tokens_with_more_context(model, corpus):
    plain, strided = (evaluate(model, corpus, corpus.test, tiny_config(evaluate={"stride": s}), CPU) for s in (None, 3))
    assert (plain.tokens, plain.words) == (strided.tokens, strided.words)
    assert plain.loss != strided.loss


def test_a_part_of_a_split_has_no_bits_per_byte(model, corpus):
    part = evaluate(model, corpus, corpus.test, tiny_config(), CPU, documents=2)
    assert part.documents == 2 and part.bits_per_byte is None
    assert part.bits_per_byte_withheld == "2 of 4 documents are scored"
    ids = corpus.test.read(0, corpus.test.document_start(2))
    assert part.words == sum(bool(corpus.vocab.word_ends[i]) for i in ids[1:])


@pytest.mark.parametrize("unknown", [0, 1, 2, 30])
def test_bits_per_byte_are_withheld_where_one_percent_of_the_scored_tokens_is_unknown(tmp_path, model, unknown):
    corpus = open_corpus(random_corpus(tmp_path / "corpus", unknown=unknown))
    measured = evaluate(model, corpus, corpus.test, tiny_config(), CPU)
    assert measured.unknown_share == pytest.approx(unknown / 159)
    if unknown < 2:
        assert measured.bits_per_byte > 0 and measured.bits_per_byte_withheld is None
    else:
        assert measured.bits_per_byte is None
        assert f"{100 * unknown / 159:.2f} % of the scored tokens are <unk>" in measured.bits_per_byte_withheld
    text = report_markdown(report_record(tiny_config(), model, 1, measured, SPEED), measured, SPEED)
    row = next(line for line in text.splitlines() if "<unk> among scored tokens" in line)
    assert ("warning" in row) == (unknown >= 2)
    assert ("stand for bytes nobody predicted" in text) == (unknown >= 2)


def test_evaluation_leaves_the_model_as_it_was(model, corpus):
    model.train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    evaluate(model, corpus, corpus.test, tiny_config(), CPU)
    assert model.training and not model.blocks[1].memory.record
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_speed_counts_words_and_tokens_after_the_warm_up(model, corpus):
    speed = measure_speed(model, corpus, corpus.test, tiny_config(), CPU, seconds=0.2)
    assert 0 < speed.words_per_second < speed.tokens_per_second


def test_a_perplexity_that_no_number_holds_is_none_beside_its_logarithm(model, corpus):
    with torch.no_grad():
        model.output_bias[0] = 5000.0  # an id that never comes
    measured = evaluate(model, corpus, corpus.test, tiny_config(), CPU)
    assert measured.perplexity is None and measured.loss == pytest.approx(5000, rel=0.01)
    assert measured.word_perplexity is None
    assert measured.word_loss == pytest.approx(measured.loss * measured.tokens / measured.words)
    speed = measure_speed(model, corpus, corpus.test, tiny_config(), CPU, seconds=0.1)
    record = report_record(tiny_config(), model, 7, measured, speed, measured)
    read = json.loads(json_text(record), parse_constant=lambda name: pytest.fail(name))
    assert read["evaluation"]["perplexity"] is read["training"]["word_perplexity"] is None
    assert read["evaluation"]["word_loss"] == measured.word_loss
    assert report_markdown(record, measured, speed).count(f"exp({measured.loss:,.1f})") == 2
    assert "perplexity exp(" in valid_line(7, measured, False, {2: 0.0})


def test_a_run_whose_perplexities_no_number_holds_finishes_and_is_reported_everywhere(
    tiny_corpus_path, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("pkm.evaluation.evaluate.LARGEST_PERPLEXITY", 1.5)
    monkeypatch.syspath_prepend(str(Path(train.__file__).parent / "scripts"))
    score = importlib.import_module("evaluate")
    file = tmp_path / "t.yaml"
    file.write_text(dump(tiny_config(corpus={"path": str(tiny_corpus_path)}, runs=str(tmp_path / "runs"))))

    def go(program, *arguments):
        monkeypatch.setattr("sys.argv", ["program", *map(str, arguments)])
        assert program.main() == 0
        return capsys.readouterr().out

    go(train, file, "evaluate.train_documents=2")
    directory = tmp_path / "runs" / "tiny"
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert read_status(directory)["state"] == "finished"
    said = go(score, directory, "--json", "--device", "cpu")
    evaluation = json.loads(said, parse_constant=lambda name: pytest.fail(name))["evaluation"]
    assert evaluation["perplexity"] is None and evaluation["loss"] > 1
    assert "exp(" in go(score, directory, "--device", "cpu")
    run = read_run(directory, "a")
    cells = dict(zip(compare.headings([run]), compare.rows([run])[0], strict=True))
    for name in ("best valid ppl", "test ppl", "test ppl per word"):
        assert re.fullmatch(r"exp\(\d+\.\d\)", cells[name])
    assert run.best["step"] == int(cells["at step"])
    (row,) = csv.DictReader(io.StringIO(compare.csv_text([run])))
    assert row["test_perplexity"] == "" and float(row["test_perplexity_log"]) == evaluation["loss"]
    assert compare.html([run], "step")
