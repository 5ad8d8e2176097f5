"""Memories of several kinds in one model: `memory:` as a list of sections."""

import json

import pytest
import torch

from pkm.config.load import dump, flatten
from pkm.config.schema import load
from pkm.errors import UserErrors
from pkm.experiments.grid import coordinate, run_name
from pkm.experiments.size import proposed
from pkm.model import cost
from pkm.model.summary import summary
from pkm.model.transformer import build_model, parameters
from tests.support.tiny import MINIMAL, VOCAB_SIZE, loaded, tiny_config
from tests.support.whole_runs import many_and_one, straight_as_resumed, trained, with_values

PRODUCT = {"layers": [1, 2], "sub_keys": 8, "heads": 2, "knn": 3, "query": {"dim": 8}, "place": "beside"}
FLAT = {"layers": [2], "keys": "flat", "slots": 20, "heads": 1, "knn": 2, "query": {"dim": 6, "norm": "none"}}
TWO = """memory:
- {layers: [2, 4], sub_keys: 64}
- {layers: [3], keys: flat, slots: 100, knn: 8}
"""


def two(**sections):
    return tiny_config(memory=[PRODUCT, FLAT], **sections)


def test_each_section_places_its_memories_and_a_second_one_in_a_block_is_named_after_its_place():
    model = build_model(two(), VOCAB_SIZE)
    assert {name: memory.slots for name, memory in model.memories()} == {1: 64, 2: 64, "2 replace": 20}
    assert list(model.tables()) == [f"blocks.{block}.values" for block in ("0.memory", "1.memory", "1.memory_replace")]
    first, second = model.blocks
    assert first.feed_forward is not None and second.feed_forward is None
    x = torch.randn(2, 5, 16)
    model.eval()
    with torch.no_grad():
        expected = model.memory("2 replace")(x) + model.memory(2)(x)
        assert torch.equal(second._feed_forward(x, None, x), expected)


def test_a_list_of_one_section_is_the_same_model_as_the_section():
    one, section = (build_model(tiny_config(memory=m), VOCAB_SIZE).state_dict() for m in ([PRODUCT], PRODUCT))
    assert one.keys() == section.keys() and all(torch.equal(one[name], section[name]) for name in one)


@pytest.mark.parametrize("memory", [[PRODUCT, FLAT], [FLAT, {**PRODUCT, "place": "after"}], [FLAT]])
def test_parameters_bytes_and_work_are_the_sum_over_all(memory):
    config = tiny_config(memory=memory)
    found, model = cost.parameters(config, VOCAB_SIZE), build_model(config, VOCAB_SIZE)
    assert (found.dense, found.values) == parameters(model)
    assert found.total == sum(p.numel() for p in model.parameters())
    # Of each section alone, what it has beyond the model without a memory.
    dense = tiny_config(memory=None)
    alone = [tiny_config(memory=m) for m in memory]
    for of in (
        lambda c: cost.flops(c, VOCAB_SIZE).training - cost.flops(c, VOCAB_SIZE).feed_forward * 3,
        lambda c: cost.traffic(c, VOCAB_SIZE, 2).values,
        lambda c: cost.traffic(c, VOCAB_SIZE, 2).batch_norm,
    ):
        assert of(config) - of(dense) == sum(of(c) - of(dense) for c in alone)
    rows = [much for what, much, _ in summary(config, VOCAB_SIZE) if what == "memory at layers"]
    assert rows == [", ".join(map(str, m["layers"])) for m in memory]


def test_it_trains_and_a_resumed_run_is_the_same_to_the_last_bit(train):
    straight = straight_as_resumed(train, memory=[PRODUCT, FLAT])
    assert list(straight.records[-1]["memories"]) == ["1", "2", "2 replace"]


@pytest.mark.parametrize("values", ["replicated", "sharded"])
def test_two_ranks_train_it_as_one_does_and_the_report_names_each(tiny_corpus_path, tmp_path, values):
    make = with_values(values, tiny_corpus_path, tmp_path, config=two)
    both = many_and_one(make, ranks=2, steps=6)
    table = "blocks.1.memory_replace.values.weight"
    both.assert_close(f"model.{table}", f"optim.values.{table}.mean")
    two_ranks, one = both.reports
    assert list(two_ranks["evaluation"]["memories"]) == ["1", "2", "2 replace"]
    assert two_ranks["evaluation"]["loss"] == pytest.approx(one["evaluation"]["loss"], rel=1e-2)
    text = (tmp_path / "many" / "report.md").read_text()
    assert "| 2 replace " in text and "| blocks.1.memory_replace.values " in text
    assert two_ranks["tables"].keys() == one["tables"].keys() and len(one["tables"]) == 3
    trained(make("many", 9), reports=True)  # one rank goes on with what two have saved


def test_an_argument_changes_every_section_and_with_a_number_one_of_them(tmp_path):
    config = loaded(tmp_path, MINIMAL + TWO, "memory.kernels=reference", "memory.1.knn=5", "memory.query.dim=32")
    assert [(m.kernels, m.knn, m.query.dim) for m in config.memories] == [("reference", 32, 32), ("reference", 5, 32)]
    assert config.memory_layers == (2, 3, 4) and config.feed_forward_layers == (1, 5, 6)
    assert loaded(tmp_path, MINIMAL + TWO, "memory=null").memories == ()
    assert [m.layers for m in loaded(tmp_path, MINIMAL + TWO, "memory=[{layers: [5], sub_keys: 64}]").memories] == [
        (5,)
    ]
    with pytest.raises(UserErrors, match=r"there is no memory\.2: memory has 2 items, counted from 0"):
        loaded(tmp_path, MINIMAL + TWO, "memory.2.knn=5")


def test_what_a_run_writes_loads_again_and_its_settings_are_numbered_as_arguments_have_them(tmp_path):
    config = loaded(tmp_path, MINIMAL + TWO)
    assert loaded(tmp_path, dump(config)) == config
    flat = flatten(config.model_dump(mode="json"))
    assert flat["memory.1.slots"] == 100 and "memory" not in flat
    again = loaded(
        tmp_path, MINIMAL + TWO, *(f"{k}={json.dumps(v)}" for k, v in flat.items() if k.startswith("memory"))
    )
    assert again == config
    with pytest.raises(UserErrors, match=r"memory must be a section of keys, or a list of at least 1 values"):
        loaded(tmp_path, MINIMAL + "memory: []\n")


def test_mistakes_of_every_section_are_told_with_their_lines(tmp_path):
    text = MINIMAL + "memory:\n- {layers: [7], sub_keys: 64}\n- {layers: [3], keys: flat, slots: 100, hads: 2}\n"
    with pytest.raises(UserErrors) as caught:
        loaded(tmp_path, text)
    first, second = caught.value.errors
    assert "memory[0].layers: [7] names a layer that is not there" in first.what and first.where.endswith("c.yaml:6")
    assert second.what == "memory[1].hads is no setting" and second.where.endswith("c.yaml:7")
    assert second.fix == "did you mean memory[1].heads?"


def test_two_memories_of_a_block_have_different_places(tmp_path):
    with pytest.raises(UserErrors) as caught:
        loaded(tmp_path, MINIMAL + TWO, "memory.1.layers=[1, 4]")
    (error,) = caught.value.errors
    assert "memory[1].layers: memory[0] has a memory at layer 4 with place: replace already" in error.what
    assert "memory.1.layers=[1, 4]" in error.where
    assert len(loaded(tmp_path, MINIMAL + TWO, "memory.1.layers=[1, 4]", "memory.1.place=after").memory_layers) == 4
    with pytest.raises(UserErrors, match=r"memory\[1\]\.layers: memory\[0\] has a memory at layer 3"):
        loaded(tmp_path, MINIMAL + "memory: [{count: 1, sub_keys: 64}, {layers: [3], sub_keys: 64}]\n")


def test_runs_of_a_grid_are_named_and_placed_by_their_first_section_and_all_are_in_the_name(tmp_path):
    config = loaded(tmp_path, MINIMAL + TWO)
    assert run_name(config).startswith("6x64-64x64-layer2+4-h4k32-batch-flat100-layer3-h4k8-batch-seed1-")
    assert [coordinate(config, key) for key in ("memories", "slots", "keys")] == [3, 4096, "product"]
    assert coordinate(config, "memory.1.slots") == 100 and coordinate(config, "memory.sub_keys") == 64


def test_a_proposed_model_has_as_many_memories_of_each_kind(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(MINIMAL + TWO)
    settings = proposed(path, 3_000_000, "20x", ["memory.1.place=after"])
    assert [len(config.layers_of(m)) for config in [load(path, settings).config] for m in config.memories] == [2, 1]


@pytest.mark.parametrize("update", ["dense", "sparse"])
def test_logs_and_reports_say_of_each_table_how_many_rows_are_never_read(train, update):
    values = {"update": update, "staleness": update == "sparse"}
    _, optim, _, straight = train(name="straight", memory=[PRODUCT, FLAT], optim={"values": values})
    train(name="resumed", memory=[PRODUCT, FLAT], optim={"values": values, "steps": 10})
    *_, resumed = train(name="resumed", memory=[PRODUCT, FLAT], optim={"values": values})
    found = []
    for directory in (straight, resumed):
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        found.append([line["tables"] for line in lines if line["kind"] == "train"])
    assert found[0] == found[1]  # it goes on where it was
    last = found[0][-1]
    names = ["blocks.0.memory.values", "blocks.1.memory.values", "blocks.1.memory_replace.values"]
    assert list(last) == names and last == optim.neglect(20)
    assert all(0 <= of["dead"] < 100 and ("stale" in of) == (update == "sparse") for of in last.values())
    if update == "sparse":
        assert all(0 <= of["stale"] < 20 for of in last.values())
