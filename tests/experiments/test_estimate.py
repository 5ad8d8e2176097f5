"""How long a grid takes, and what a dry run shows of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pkm.corpus.store import open_corpus
from pkm.errors import UserError
from pkm.experiments import estimate
from pkm.experiments.estimate import Estimate, Estimator, total
from pkm.experiments.jobs import Job
from pkm.format import roughly
from pkm.model.cost import flops, numbers_made
from tests.support.tiny import tiny_config


@pytest.fixture
def config(tiny_corpus_path: Path):
    def make(**sections):
        return tiny_config(corpus={"path": str(tiny_corpus_path)}, **sections)

    return make


def job(config, trained: bool = True, timed: bool = False) -> Job:
    return Job(config, Path("a.yaml"), (), ["grid/cell"], trained, timed)


def test_without_any_run_it_is_from_this_machines_products_and_what_its_memory_moves(config, monkeypatch) -> None:
    monkeypatch.setattr(estimate, "matmul_rate", lambda device, precision, threads: 4e9)
    monkeypatch.setattr(estimate, "copy_rate", lambda threads: 1e9)
    c = config()
    vocabulary = open_corpus(c.corpus.path).vocab.size
    speed, basis = Estimator().tokens_per_second(c)
    moved = 13 * 4 * numbers_made(c, vocabulary)
    seconds = 64 * flops(c, vocabulary).training / (0.9 * 4e9) + moved / 1e9
    assert speed == pytest.approx(64 / seconds) and "matrix products and memory" in basis
    assert Estimator(ranks=2).tokens_per_second(c)[0] == pytest.approx(2 * speed)


def test_a_narrow_model_with_many_reads_takes_longer_than_its_flops_say(config, monkeypatch) -> None:
    monkeypatch.setattr(estimate, "matmul_rate", lambda device, precision, threads: 1e12)
    few, many = config(memory={"heads": 1, "knn": 1}), config(memory={"heads": 8, "knn": 8})
    assert Estimator().tokens_per_second(few)[0] > 1.5 * Estimator().tokens_per_second(many)[0]


def test_runs_of_the_cell_itself_tell_most_and_others_tell_by_their_flops(config) -> None:
    estimator = Estimator()
    estimator.learn(config(seed=1), 1000.0)
    assert estimator.tokens_per_second(config(seed=2)) == (1000.0, "this cell's own runs")
    vocabulary = open_corpus(config().corpus.path).vocab.size
    other = config(model={"layers": 4})
    share = flops(config(), vocabulary).training / flops(other, vocabulary).training
    assert estimator.tokens_per_second(other) == (pytest.approx(1000.0 * share), "1 runs of this scale")


def test_what_is_left_is_steps_evaluations_and_the_words_a_second(config) -> None:
    c = config(optim={"steps": 100}, evaluate={"every_steps": 50, "documents": 2})
    estimator = Estimator()
    estimator.learn(c, 640.0)
    work = flops(c, estimator.vocabulary(c))
    forward = 640.0 * work.training / work.forward
    whole, half = estimator.of(job(c, timed=True)), estimator.of(job(c), done=50)
    # 4 test documents of 40 tokens are read twice, 2 validation documents in each of two evaluations.
    assert whole.train == pytest.approx(estimate.START_SECONDS + 10.0 + (2 * 160 + 2 * 80) / forward)
    assert whole.train - half.train == pytest.approx(5.0 + 80 / forward)
    assert whole.speed == pytest.approx(estimate.ROUNDS * estimate.START_SECONDS + 160 / forward) and half.speed == 0
    assert estimator.of(job(c, trained=False, timed=True)).train == 0


def test_the_whole_is_shared_by_the_workers_but_words_a_second_are_measured_alone() -> None:
    runs = [Estimate(train, 2.0, 0, "") for train in (10.0, 20.0, 30.0)]
    assert total(runs, 1) == 66.0
    assert total(runs, 2) == 36.0
    assert total(runs, 9) == 36.0  # the longest run
    assert total([], 2) == 0.0


def test_runs_on_disk_are_learned_from_and_what_is_damaged_is_passed_over(config, tmp_path: Path) -> None:
    from pkm.config.load import dump

    for name, text in {"good": dump(config()), "odd": "nonsense: 1\n", "young": dump(config(seed=2))}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
        steps = [1, 10, 20] if name != "young" else [1]
        records = [{"kind": "train", "step": step, "loss": 1.0, "tokens_per_second": 50.0 * step} for step in steps]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    estimator = Estimator()
    assert estimator.learn_from_disk(tmp_path) == 1
    assert estimator.tokens_per_second(config()) == (1000.0, "this cell's own runs")


def test_a_matrix_product_is_timed_on_this_machine() -> None:
    assert 1e8 < estimate.matmul_rate("cpu", "fp32", 1) < 1e14


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119, "119 s"), (150, "2.5 min"), (3000, "50 min"), (5000, "1.4 h"), (40 * 3600, "40 h"),
     (86400 * 5, "5.0 days"), (86400 * 365 * 30, "30 years")],
)  # fmt: skip
def test_times_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert roughly(seconds) == text


def test_a_corpus_that_a_run_would_refuse_is_refused_before_anything_is_planned(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    damaged, none = (tiny_config(corpus={"path": str(path)}) for path in (broken, tmp_path / "none"))
    with pytest.raises(UserError, match="the manifest is damaged"):
        Estimator().corpus(damaged)
    assert Estimator().corpus(none) is None, "what is not prepared yet may be planned with"
