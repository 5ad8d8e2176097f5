import json

import pytest

from pkm.evaluation import speed
from pkm.evaluation.evaluate import Speed
from tests.support.tiny import tiny_config


@pytest.fixture
def measured(monkeypatch, tiny_corpus_path, tmp_path):
    """Measures a model that is said to be as fast as told, and returns what speed.json then says."""

    def go(words, again=False, threads=1):
        found = Speed(words, 2 * words, f"cpu, {threads} threads", "fp32", 4, 8)
        monkeypatch.setattr(speed, "measure_speed", lambda *_: found)
        config = tiny_config(runs=str(tmp_path), corpus={"path": str(tiny_corpus_path)})
        speed.time_run(config, again=again)
        record = json.loads((config.directory / "speed.json").read_text())
        return record["words_per_second"], record["tokens_per_second"], speed.measured_here(config, trained=False)

    return go


def test_the_median_of_all_rounds_stands_in_the_file_and_only_as_many_as_a_grid_asks_for_are_enough_for_it(measured):
    assert measured(100.0) == (100, 200, False)
    assert measured(10.0, again=True) == (55, 110, False)
    assert measured(90.0, again=True) == (90, 180, True)


def test_a_round_on_other_hardware_or_without_again_begins_anew(measured):
    measured(100.0)
    assert measured(10.0, again=True, threads=2) == (10, 20, False)
    assert measured(30.0) == (30, 60, False)
    assert measured(50.0, again=True) == (40, 80, False)
