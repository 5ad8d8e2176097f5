"""What settings cannot do together is refused by name, and nothing else is: as the README's table says."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import yaml

from pkm.config.memory_rules import OF_A_MEMORY
from pkm.config.rules import IMPOSSIBLE, cut_short, impossible, impossible_for
from pkm.config.schema import Config, MemoryConfig, load
from pkm.errors import UserErrors
from tests.support.tiny import MEMORY, MINIMAL, loaded, merged

README = Path(__file__).parents[2] / "README.md"


RULES = [*IMPOSSIBLE, *((f"memory.{key}", *rule) for key, *rule in OF_A_MEMORY)]

NGRAM = ["memory.keys=ngram", "memory.sub_keys=null", "memory.slots=500"]

# One case for each of RULES, in their order: overrides of a good config that break it.
BREAKS: list[tuple[str, list[str]]] = [
    ("model.heads", ["model.heads=7"]),
    ("model.kv_heads", ["model.kv_heads=3"]),
    ("model.positions", ["model.positions=rotary", "model.dim=56"]),
    ("model.experts.active", ["model.experts={count: 4, active: 5}"]),
    ("model.experts.at", ["model.experts={count: 4, at: []}"]),
    ("model.experts.at", ["model.experts={count: 4, at: [2, 1]}"]),
    ("model.experts.at", ["model.experts={count: 4, at: [4, 5]}"]),
    ("optim.batch_tokens", ["optim.batch_tokens=100"]),
    ("evaluate.stride", ["evaluate.stride=65"]),
    ("optim.values.clip", ["optim.values.update=in_backward", "optim.values.clip=1"]),
    ("optim.values.update", ["optim.values.update=in_backward", "precision=fp16"]),
    ("optim.values.dtype", ["optim.values.update=dense", "optim.values.dtype=bf16"]),
    ("optim.values.state_dtype", ["optim.values.update=dense", "optim.values.state_dtype=bf16"]),
    ("optim.values.weight_decay", ["optim.values.weight_decay=0.1", "optim.values.update=in_backward"]),
    ("optim.values.weight_decay", ["optim.values.weight_decay=0.1", "optim.values.dtype=bf16"]),
    ("optim.dense.weight_decay", ["optim.dense.weight_decay=4001"]),
    ("optim.matrices.weight_decay", ["optim.matrices={lr: 2x, weight_decay: 2001}"]),
    ("optim.embeddings.weight_decay", ["optim.embeddings.weight_decay=4001"]),
    ("optim.addressing.weight_decay", ["optim.addressing.weight_decay=4001"]),
    ("optim.values.weight_decay", ["optim.values.weight_decay=1001"]),
    ("optim.values.staleness", ["optim.values.staleness=true", "optim.values.update=dense"]),
    ("memory.layers", ["memory.count=1"]),
    ("memory.layers", ["memory.layers=[]"]),
    ("memory.layers", ["memory.layers=[5, 7]"]),
    ("memory.layers", ["memory.layers=[5, 3]"]),
    ("memory.count", ["memory.layers=null", "memory.count=4"]),
    ("memory.sub_keys", ["memory.sub_keys=null"]),
    ("memory.slots", ["memory.slots=4096"]),
    ("memory.slots", ["memory.keys=flat", "memory.sub_keys=null"]),
    ("memory.sub_keys", ["memory.keys=flat", "memory.slots=64"]),
    ("memory.knn", ["memory.knn=65"]),
    ("memory.knn", ["memory.keys=flat", "memory.sub_keys=null", "memory.slots=20"]),
    ("memory.query.dim", ["memory.query.dim=7"]),
    ("memory.share_values", ["memory.layers=[3, 5]", "memory.share_values=true", "optim.values.update=in_backward"]),
    ("memory.sub_keys", ["memory.keys=tucker", "memory.sub_keys=null"]),
    ("memory.slots", ["memory.keys=tucker", "memory.slots=4096"]),
    ("memory.expansion", ["memory.keys=tucker", "memory.expansion=5"]),
    ("memory.cores_loss", ["memory.keys=tucker", "memory.rank=1", "memory.cores_loss=0.001"]),
    ("memory.expansion", ["memory.expansion=4"]),
    ("memory.knn", ["memory.keys=tucker", "memory.expansion=4", "memory.knn=129"]),
    ("memory.query.dim", ["memory.keys=tucker", "memory.query.dim=62", "memory.queries_by_rank=true"]),
    ("memory.values_dim", ["memory.keys=tucker", "memory.cores=3"]),
    ("memory.read", ["memory.keys=tucker", "memory.read=experts"]),
    ("memory.input_dim", ["memory.input_dim=32"]),
    ("memory.kernels", ["memory.keys=tucker", "memory.kernels=faiss"]),
    ("memory.place", ["memory.place=before"]),
    ("memory.skip", ["memory.skip=1"]),
    ("memory.skip", ["memory.place=beside", "memory.skip=2"]),
    ("memory.orders", [*NGRAM, "memory.orders=[3, 2]"]),
    ("memory.read", [*NGRAM, "memory.read=experts"]),
    ("memory.keys_norm", [*NGRAM, "memory.keys_norm=rms"]),
    ("memory.share_values", [*NGRAM, "memory.share_values=true"]),
    ("memory.convolution", [*NGRAM, "memory.convolution=4"]),
    ("memory.values_dim", [*NGRAM, "memory.values_dim=8"]),
]


@pytest.mark.parametrize(("number", "key", "overrides"), [(i, *case) for i, case in enumerate(BREAKS)])
def test_each_rule_refuses_its_case_and_no_other_does(
    tmp_path: Path, number: int, key: str, overrides: list[str]
) -> None:
    with pytest.raises(UserErrors) as caught:
        loaded(tmp_path, MINIMAL + MEMORY, *overrides)
    (error,) = caught.value.errors
    assert f"{key}: " in error.what and error.fix
    assert RULES[number][0] == key


def test_every_rule_has_a_case() -> None:
    assert [rule[0] for rule in RULES] == [key for key, _ in BREAKS]


def test_rates_that_are_not_known_yet_do_not_hide_a_mistake_elsewhere(tmp_path: Path) -> None:
    rates = [f"optim.{group}.lr=auto" for group in ("dense", "embeddings", "addressing", "values")]
    with pytest.raises(UserErrors, match=r"model\.dim"):
        loaded(tmp_path, MINIMAL + MEMORY, "model.dim=wide", *rates, "optim.dense.weight_decay=0.1")


def test_the_line_to_blame_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserErrors) as caught:
        loaded(tmp_path, MINIMAL + "memory:\n  layers: [5]\n  sub_keys: 64\n  knn: 100\n")
    assert caught.value.errors[0].where == f"{tmp_path}/c.yaml:8"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optim.steps=1000", "optim.dense.warmup_steps=1000", "optim.values.warmup_steps=0"], None),
        (["optim.steps=1000", "optim.dense.warmup_steps=4000", "optim.values.warmup_steps=0"], "dense 25 % of it"),
        (["optim.steps=1000", "optim.dense.warmup_steps=0", "optim.values.warmup_steps=2000"], "values 50 % of it"),
    ],
)
def test_a_run_that_ends_within_a_warm_up_is_told_so(tmp_path: Path, overrides: list[str], said: str | None) -> None:
    told = cut_short(loaded(tmp_path, MINIMAL + MEMORY, *overrides))
    assert said in told if said else told == ""


def test_a_batch_smaller_than_the_ranks_is_refused(tmp_path: Path) -> None:
    small = loaded(tmp_path, MINIMAL)
    assert impossible_for(small, 8) == []
    ((key, what, fix),) = impossible_for(small, 9)
    assert key == "optim.batch_tokens" and "fewer than the 9 ranks" in what and "576" in fix


@pytest.mark.parametrize(
    ("ranks", "overrides", "keys"),
    [
        (1, ["optim.values.update=in_backward"], []),
        (8, ["optim.values.update=in_backward", "parallel.values=sharded"], []),
        (8, ["optim.values.update=in_backward"], ["optim.values.update"]),
        (1, ["optim.values.update=in_backward", "optim.micro_batch=4"], ["optim.micro_batch"]),
        (2, ["optim.values.update=in_backward", "optim.micro_batch=4", "parallel.values=sharded"], []),
        (8, ["parallel.values=sharded", "model.dim=72"], []),
        (8, ["parallel.values=sharded", "model.dim=68", "model.heads=4"], ["parallel.values"]),
        (8, ["optim.values.clip=1", "optim.micro_batch=1", "precision=fp16", "compile=true"], []),
    ],
)
def test_what_some_numbers_of_ranks_cannot_do_is_refused_by_name(
    tmp_path: Path, ranks: int, overrides: list[str], keys: list[str]
) -> None:
    found = impossible_for(loaded(tmp_path, MINIMAL + MEMORY, *overrides), ranks)
    assert [key for key, _, _ in found] == keys


def test_what_turns_out_impossible_later_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(MINIMAL)
    resolved = load(path)
    resolved.refuse(impossible_for(resolved.config, 8))
    with pytest.raises(UserErrors, match=r"c.yaml:3: optim.batch_tokens: 512 tokens are 8 windows"):
        resolved.refuse(impossible_for(resolved.config, 9))


def test_a_config_made_in_code_is_held_to_the_same_rules() -> None:
    good = Config.model_validate(yaml.safe_load(MINIMAL))
    assert impossible(good) == []
    bad = good.model_copy(update={"memory": MemoryConfig(layers=(9,), sub_keys=8, knn=9)})
    assert [key for key, _, _ in impossible(bad)] == ["memory.layers", "memory.knn"]


# ---- the README's table -------------------------------------------------------------------------------------------


def cells() -> dict[tuple[str, str], str]:
    """(update, where the values are) -> what the README says of it."""
    rows = re.findall(r"^\| `(\w+)`[^|]*\| (.+?) \| (.+?) \| (.+?) \|$", README.read_text(encoding="utf-8"), re.M)
    places = ("alone", "replicated", "sharded")
    return {(update, place): cell for update, *of_row in rows for place, cell in zip(places, of_row, strict=True)}


def refuses(cell: str, asked: tuple[str, ...]) -> bool:
    """Whether a cell of the table says no to one of what is asked for."""
    if cell == "yes":
        return False
    if cell.startswith("yes, values and moments in fp32"):
        return "bf16 values" in asked or "bf16 moments" in asked
    if cell.startswith("without "):
        return not set(asked).isdisjoint(cell.removeprefix("without ").split(", "))
    assert cell.startswith("no: ")
    return True


ASKED = {
    "clipping": {"optim": {"values": {"clip": 1.0}}},
    "accumulation": {"optim": {"micro_batch": 1}},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "tf32": {"precision": "tf32"},
    "compile": {"compile": True},
    "recomputation": {"parallel": {"activation_checkpointing": True}},
    "bf16 values": {"optim": {"values": {"dtype": "bf16"}}},
    "bf16 moments": {"optim": {"values": {"state_dtype": "bf16"}}},
}
PRECISIONS = {"bf16", "fp16", "tf32"}
# In ASKED's order, and one precision at most: a second one would take the first one's place.
SETS = [
    asked for n in range(4) for asked in itertools.combinations(ASKED, n) if len(PRECISIONS.intersection(asked)) <= 1
]


@pytest.mark.parametrize("place", ["alone", "replicated", "sharded"])
@pytest.mark.parametrize("update", ["sparse", "dense", "in_backward"])
def test_what_the_readmes_table_says_no_to_is_refused_by_name_and_all_else_is_not(update: str, place: str) -> None:
    cell, ranks = cells()[update, place], 1 if place == "alone" else 2
    values = "sharded" if place == "sharded" else "replicated"
    base = {**yaml.safe_load(MINIMAL + MEMORY), "parallel": {"values": values}}
    base["optim"]["values"] = {"update": update}
    for asked in SETS:
        settings = base
        for name in asked:
            settings = merged(settings, ASKED[name])
        config = Config.model_validate(settings)
        found = impossible(config) + impossible_for(config, ranks)
        assert bool(found) == refuses(cell, asked), (asked, found)
        assert all(key.startswith("optim.") and what and fix for key, what, fix in found)


@pytest.mark.parametrize(
    ("settings", "width"),
    [([], 64), (["memory.read=experts", "memory.values_dim=6"], 6), (["memory.read=experts-linear", "memory.input_dim=6"], 6),
     (["memory.keys=tucker", "memory.cores=4", "memory.values_dim=24"], 6)],
    ids=["rows", "experts", "linear experts", "cores"],
)  # fmt: skip
def test_ranks_that_do_not_divide_the_columns_of_any_table_are_refused(
    tmp_path: Path, settings: list[str], width: int
) -> None:
    made = loaded(tmp_path, MINIMAL + MEMORY, *settings, "parallel.values=sharded", "optim.batch_tokens=3072")
    if width == 64:
        assert [what for key, what, _ in impossible_for(made, 2) if key == "parallel.values"] == []
    ranks = 4 if width == 6 else 3
    (what,) = [what for key, what, _ in impossible_for(made, ranks) if key == "parallel.values"]
    assert what == f"{ranks} ranks cannot share the {width} columns of the values evenly"
