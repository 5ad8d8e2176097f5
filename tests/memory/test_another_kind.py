"""What a new kind of memory takes: this file, and a line in pkm.config.kinds.

The kind is a read that multiplies the sum of rows by a scale learnt for each column. Nothing else in the package knows of it.
"""

import pytest
import torch
from torch import nn

from pkm.config import kinds
from pkm.config.load import dump, json_schema
from pkm.config.schema import Config, load
from pkm.distributed import dist
from pkm.errors import UserErrors
from pkm.inference.trained import load_trained
from pkm.memory.cost import Cost, rows
from pkm.model import cost
from pkm.model.summary import summary
from pkm.model.transformer import build_model, parameters
from pkm.train.optim import build_optimizers
from tests.support.tiny import VOCAB_SIZE, tiny_config
from tests.support.whole_runs import many_and_one, straight_as_resumed, trained, with_values

# ---- the kind ---------------------------------------------------------------------------------------------------------


class ScaledRows(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, values, x, indices, weights, dtype):
        return values.read(indices, weights, dtype) * self.scale.to(dtype)


def scaled_rows(config, dim):
    return ScaledRows(dim)


def scaled_rows_cost(m, d):
    plain = rows(m, d)
    return Cost(
        parameters=d, row=plain.row, widths=plain.widths, selections=1, exchanged=d, flops=plain.flops + d, kept=d
    )


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    here = "tests.memory.test_another_kind"
    kind = kinds.Kind(f"{here}:scaled_rows", f"{here}:scaled_rows_cost")
    monkeypatch.setitem(kinds.READS, "scaled rows", kind)


# ---- what it can do then ----------------------------------------------------------------------------------------------

SCALE = "blocks.1.memory.read.scale"


def scaled(**sections):
    return {**sections, "memory": {"read": "scaled rows", **sections.get("memory", {})}}


def test_the_scale_is_what_the_read_is_multiplied_by():
    model = build_model(tiny_config(**scaled()), VOCAB_SIZE)
    plain = build_model(tiny_config(), VOCAB_SIZE)  # the same weights but for the scale, which begins as 1
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(model.memory(2)(x), plain.memory(2)(x))
    with torch.no_grad():
        model.memory(2).read.scale.copy_(torch.arange(16.0))
    torch.testing.assert_close(model.memory(2)(x), plain.memory(2)(x) * torch.arange(16.0))


def test_it_trains_and_a_resumed_run_is_the_same_to_the_last_bit(train):
    straight = straight_as_resumed(train, **scaled())
    assert not torch.equal(straight.model.memory(2).read.scale, torch.ones(16))
    assert f"optim.dense.{SCALE}.exp_avg" in straight.tensors


def test_its_parameters_and_work_are_counted():
    config = tiny_config(**scaled())
    plain, found = (cost.parameters(c, VOCAB_SIZE) for c in (tiny_config(), config))
    assert (found.total - plain.total, found.dense - plain.dense) == (16, 16)
    model = build_model(config, VOCAB_SIZE)
    assert found.total == sum(p.numel() for p in model.parameters())
    assert parameters(model) == (found.dense, found.values)
    assert cost.flops(config, VOCAB_SIZE).forward - cost.flops(tiny_config(), VOCAB_SIZE).forward == 16
    assert any(f"{found.total:,}" in remark for _, _, remark in summary(config, VOCAB_SIZE))
    optim = build_optimizers(config.optim, model)
    assert any(p is model.memory(2).read.scale for p in optim.dense.groups["dense"])


@pytest.mark.parametrize("values", ["replicated", "sharded"])
def test_two_ranks_train_it_as_one_does_save_it_whole_and_report_it(tiny_corpus_path, tmp_path, values):
    def whole_width(model):
        return model.memory(2).values.weight.shape[1] * (dist.world_size() if values == "sharded" else 1)

    make = with_values(values, tiny_corpus_path, tmp_path, config=lambda **sections: tiny_config(**scaled(**sections)))
    both = many_and_one(make, 2, 6, whole_width)
    assert both.found == [16, 16] and both.many["model.blocks.1.memory.values.weight"].shape == (64, 16)
    both.assert_close(
        f"model.{SCALE}", f"optim.dense.{SCALE}.exp_avg", "optim.values.blocks.1.memory.values.weight.mean"
    )
    two, one = both.reports
    assert two["parameters"] == one["parameters"]
    assert two["evaluation"]["loss"] == pytest.approx(one["evaluation"]["loss"], rel=1e-2)
    assert two["evaluation"]["memories"]["2"]["percent"] > 0
    trained(make("many", 9), reports=True)  # one rank goes on with what two have saved
    assert load_trained(tmp_path / "many", "latest").model.memory(2).read.scale.shape == (16,)


def test_a_config_names_it_and_an_unknown_kind_is_refused_with_what_there_is(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(dump(tiny_config(**scaled())))
    reads = [name for name in kinds.READS if name != "scaled rows"]
    assert load(path).config.memory.read == "scaled rows"
    assert json_schema(Config)["$defs"]["MemoryConfig"]["properties"]["read"]["enum"] == [*reads, "scaled rows"]
    with pytest.raises(
        UserErrors, match=r"memory\.keys must be one of: product, flat, .*; found produkt\s+fix: did you mean product"
    ):
        load(path, ["memory.keys=produkt"])
    with pytest.raises(UserErrors, match=r"memory\.read must be .*rows.*; found row"):
        load(path, ["memory.read=row"])
