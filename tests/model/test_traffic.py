"""The bytes that the dry run expects ranks to send are those that they hand to torch.distributed."""

import pytest

from benchmarks.parallel import VOCABULARY, measure
from pkm.model.cost import traffic
from tests.support.fork import on_ranks
from tests.support.tiny import tiny_config

FEW = 64  # bytes: the loss and the norms


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"values": "sharded"}},
        {"parallel": {"values": "sharded"}, "optim": {"micro_batch": 1}},
        {"parallel": {"values": "sharded", "activation_checkpointing": True}},
        {"optim": {"values": {"update": "dense"}}},
        {"parallel": {"batch_norm": "each rank"}, "optim": {"values": {"update": "dense"}}},
        {"memory": None},
    ],
)
def test_the_dry_run_expects_what_ranks_send(ranks, sections):
    config = tiny_config(**sections)
    for found in on_ranks(ranks, lambda rank: measure(config, steps=1)):
        assert found["sent_bytes"] == pytest.approx(found["expected_bytes"], abs=FEW * ranks)


def test_replicated_values_send_less_than_the_dry_run_expects_at_most():
    config = tiny_config()
    (found, _) = on_ranks(2, lambda rank: measure(config, steps=1))
    most = traffic(config, VOCABULARY, 2)
    assert most.total - most.values < found["sent_bytes"] <= most.total + FEW


def test_one_rank_sends_nothing():
    assert traffic(tiny_config(), VOCABULARY, 1).total == 0
