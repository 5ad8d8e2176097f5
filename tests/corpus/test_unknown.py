"""pkm/corpus/unknown.py: what the vocabulary does not know is counted, shown and warned of."""

from __future__ import annotations

import json

import pytest
import torch

from pkm.corpus.store import fingerprint_of, open_corpus
from pkm.corpus.unknown import percent, shares, warning
from pkm.device import Compute
from pkm.model.transformer import build_model
from pkm.train.log_lines import start_line
from tests.support.tiny import VOCAB_SIZE, random_corpus, tiny_config


@pytest.fixture(params=["counted", "of an older version"])
def make(request, tmp_path):
    def corpus(unknown: int):
        path = random_corpus(tmp_path / f"corpus{unknown}", unknown=unknown)
        if request.param != "counted":
            manifest = json.loads((path / "manifest.json").read_text())
            before = fingerprint_of(manifest)
            for split in manifest["splits"].values():
                for shard in split["shards"]:
                    del shard["unknown"]
            assert fingerprint_of(manifest) == before
            (path / "manifest.json").write_text(json.dumps(manifest))
        return open_corpus(path)

    return corpus


def test_shares_are_those_of_the_tokens_also_where_no_manifest_counts_them(make):
    assert shares(make(12)) == pytest.approx({"train": 12 / 2400, "valid": 12 / 160, "test": 12 / 160})


def test_it_is_warned_of_one_percent_and_more_and_of_those_splits_alone(make):
    assert warning(make(0)) == warning(make(1)) == ""
    assert warning(make(2)).startswith("warning: 1.25 % of the tokens of valid, 1.25 % of the tokens of test are <unk>")
    assert "train" in warning(make(30))


def test_the_first_line_of_a_run_says_the_share_and_the_second_warns(make):
    model, compute = build_model(tiny_config(), VOCAB_SIZE), Compute(torch.device("cpu"), "fp32")
    (line,) = start_line(model, compute, make(0), 0).splitlines()
    assert line.endswith("| 0 % of training tokens are <unk>")
    line, warned = start_line(model, compute, make(12), 0).splitlines()
    assert line.endswith("| 0.50 % of training tokens are <unk>") and warned.startswith("warning: 7.50 %")


def test_a_share_that_is_not_nothing_is_not_written_as_nothing():
    assert [percent(share) for share in (0.0, 1e-9, 0.0001, 0.0123, 1.0)] == [
        "0 %", "under 0.01 %", "0.01 %", "1.23 %", "100.00 %",
    ]  # fmt: skip
