"""The schema of a run and the files that ship: defaults, what follows from settings, the paper's tables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pkm.config import recipe
from pkm.config.load import load as load_file
from pkm.config.schema import Config, MemoryConfig, MlflowConfig, WandbConfig, load
from pkm.config.schema_node import SchemaNode
from pkm.errors import UserErrors
from pkm.experiments import grid
from tests.support.tiny import MEMORY, MINIMAL, loaded

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
PAPER = CONFIGS / "paper"
YAMLS = sorted(CONFIGS.rglob("*.yaml"))
GRIDS = [p for p in YAMLS if p.stem in grid.names() or "\ncells:" in p.read_text()]
SHIPPED = [p for p in YAMLS if p.parent.name != "scales" and p not in GRIDS]


def shipped_id(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


class TestDerived:
    @pytest.mark.parametrize(
        ("layers", "count", "expected"),
        # L=16, N=2 is the paper's own example (4.3); the others are its table 1 at regular intervals.
        [(12, 1, (6,)), (12, 2, (4, 8)), (12, 3, (3, 6, 9)), (16, 1, (8,)), (16, 2, (6, 12)), (24, 1, (12,))],
    )
    def test_memories_stand_at_regular_intervals(
        self, tmp_path: Path, layers: int, count: int, expected: tuple[int, ...]
    ) -> None:
        text = MINIMAL.replace("layers: 6", f"layers: {layers}") + f"memory: {{count: {count}, sub_keys: 64}}\n"
        assert loaded(tmp_path, text).memory_layers == expected

    def test_a_dense_model_has_no_memory(self, tmp_path: Path) -> None:
        dense = loaded(tmp_path, MINIMAL)
        assert dense.memory is None and dense.memory_layers == () and dense.slots == 0

    def test_widths_and_batches_follow_from_the_settings(self, tmp_path: Path) -> None:
        made = loaded(tmp_path, MINIMAL + MEMORY)
        assert (made.ffn, made.sequences, made.slots) == (256, 8, 4096)
        assert made.directory == Path("runs/a")
        assert loaded(tmp_path, MINIMAL, "model.ffn=100").ffn == 100

    def test_a_home_directory_is_expanded(self, tmp_path: Path) -> None:
        made = loaded(tmp_path, MINIMAL, "corpus.path=~/corpus", "runs=~/runs")
        assert made.corpus.path == Path.home() / "corpus" and made.runs == Path.home() / "runs"

    @pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/", ".", "a b", "a/../b", "-a"])
    def test_a_name_cannot_leave_the_runs_directory(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(UserErrors, match=r"c.yaml:1: name must be text: letters, digits"):
            loaded(tmp_path, MINIMAL.replace("name: a", f"name: '{name}'"))

    def test_configs_are_frozen(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="frozen"):
            loaded(tmp_path, MINIMAL).seed = 2


class TestShipped:
    @pytest.mark.parametrize("path", SHIPPED, ids=shipped_id)
    def test_it_parses_and_its_resolved_form_is_the_same_config(self, path: Path, tmp_path: Path) -> None:
        resolved = load(path)
        again = tmp_path / "resolved.yaml"
        again.write_text(resolved.yaml)
        assert load(again).config == resolved.config

    @pytest.mark.parametrize("path", [p for p in GRIDS if p.parent != PAPER], ids=shipped_id)
    def test_every_cell_of_a_study_is_a_config_and_no_two_are_the_same(self, path: Path) -> None:
        own = load_file(path, (), grid.GridSettings).config.sizes_of
        cells = grid.load_grid(str(path), own or "paper").cells
        assert len({grid.run_name(cell.config) for cell in cells}) == len(cells) > 2

    @pytest.mark.parametrize("path", YAMLS, ids=shipped_id)
    def test_its_first_line_names_the_schema_for_editors(self, path: Path) -> None:
        found = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", path.read_text().splitlines()[0])
        kind = "scale.schema" if path.parent.name == "scales" else "schema" if path in SHIPPED else "grid.schema"
        assert found and (path.parent / found[1]).resolve() == (PAPER if "." in kind else CONFIGS) / f"{kind}.json"

    def test_no_two_would_run_in_the_same_directory(self) -> None:
        names = [load(path).config.name for path in SHIPPED]
        assert len(set(names)) == len(names)

    def test_base_yaml_shows_every_setting_with_its_default(self) -> None:
        shown = yaml.safe_load((CONFIGS / "base.yaml").read_text())
        needed = {"name": "base", "corpus": {"path": "prepared/sample"}, "optim": {"steps": 1000, "batch_tokens": 8192}}
        defaults = Config.model_validate(needed)
        assert load(CONFIGS / "base.yaml").config == defaults
        assert _keys(shown) == _keys(defaults.model_dump(mode="json"))

    def test_base_yaml_shows_every_setting_of_a_memory_in_comments(self) -> None:
        text = (CONFIGS / "base.yaml").read_text()
        block = re.search(r"^# memory:\n((?:#   .*\n)+)", text, re.M)
        assert block
        shown = yaml.safe_load(re.sub(r"^# ", "", block[0], flags=re.M))["memory"]
        assert shown == MemoryConfig().model_dump(mode="json")

    def test_every_setting_of_base_yaml_has_a_comment(self) -> None:
        lines = (CONFIGS / "base.yaml").read_text().splitlines()
        settings = [line for line in lines if re.match(r"(# )? *\w+: +\S", line) and not line.startswith("# `")]
        assert len(settings) > 50
        assert [line for line in settings if " # " not in line] == []

    def test_the_json_schemas_fit_the_code(self) -> None:
        command = [sys.executable, REPOSITORY / "scripts/schema.py", "--check"]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def test_every_setting_has_a_description_in_the_json_schema(self) -> None:
        whole = Config.model_json_schema()
        parts = {"Config": whole, **whole["$defs"]}
        bare = [
            f"{name}.{key}"
            for name, part in parts.items()
            for key, setting in part["properties"].items()
            if "description" not in setting and not _described_section(setting, whole["$defs"])
        ]
        assert bare == []


class TestPaper:
    """Every model of the paper's four tables, as printed there."""

    def test_table_1_has_its_fourteen_models(self) -> None:
        expected = {
            **{f"12x1024-{n}mem": (12, 1024, at) for n, at in enumerate([(), (6,), (4, 8), (3, 6, 9)])},
            **{f"12x1600-{n}mem": (12, 1600, at) for n, at in enumerate([(), (6,)])},
            **{f"16x1024-{n}mem": (16, 1024, at) for n, at in enumerate([(), (8,), (6, 12)])},
            **{f"16x1600-{n}mem": (16, 1600, at) for n, at in enumerate([(), (8,)])},
            **{f"24x1024-{n}mem": (24, 1024, at) for n, at in enumerate([(), (12,)])},
            "24x1600-0mem": (24, 1600, ()),
        }
        cells = _cells("table1")
        assert {name: (c.model.layers, c.model.dim, c.memory_layers) for name, c in cells.items()} == expected
        assert {c.model.heads for c in cells.values()} == {16}
        assert {_memory(c) for c in cells.values() if c.memory} == {("product", 512**2, 4, 32, 512, "batch", "replace")}

    def test_table_2_has_its_twelve_models_and_the_one_without_memory(self) -> None:
        cells = _cells("table2")
        assert cells.pop("no-memory").memory is None
        expected = {(side**2, norm) for side in (128, 256, 384, 512, 768, 1024) for norm in ("batch", "none")}
        assert len(cells) == 12 and {(c.slots, c.memory.query.norm) for c in cells.values() if c.memory} == expected
        for name, c in cells.items():
            side, word = name.split("x")[0], name.split("-")[1]
            assert c.memory and c.slots == int(side) ** 2
            assert c.memory.query.norm == {"batchnorm": "batch", "plain": "none"}[word]
            _is_the_ablation_model(c)

    def test_table_3_has_its_six_positions(self) -> None:
        cells = _cells("table3")
        assert {name: c.memory_layers for name, c in cells.items()} == {f"position-{i}": (i,) for i in range(1, 7)}
        assert {_memory(c) for c in cells.values()} == {("product", 512**2, 4, 32, 512, "batch", "replace")}

    def test_table_4_sets_flat_keys_beside_product_keys_of_as_many_slots(self) -> None:
        cells = _cells("table4")
        assert len(cells) == 12
        for side in (128, 256, 384, 512, 768, 1024):
            flat, product = cells[f"flat-{side}x{side}"], cells[f"product-{side}x{side}"]
            assert _memory(flat) == ("flat", side**2, 4, 32, 512, "batch", "replace")
            assert _memory(product) == ("product", side**2, 4, 32, 512, "batch", "replace")
            _is_the_ablation_model(flat)
            assert _settings(product) == _settings(_cells("table2")[f"{side}x{side}-batchnorm"])

    def test_all_train_as_the_paper_does(self) -> None:
        for table in ("table1", "table2", "table3", "table4"):
            for c in _cells(table).values():
                dense, values = c.optim.dense, c.optim.values
                assert (dense.lr, dense.betas, dense.schedule) == (2.5e-4, (0.9, 0.98), "inverse_sqrt")
                assert (values.lr, values.schedule) == (1e-3, "constant")
                assert (c.model.positions, c.precision, c.model.dropout) == ("learned", "fp16", 0.0)


def _cells(table: str) -> dict[str, Config]:
    return {cell.name: cell.original for cell in grid.load_grid(table, "paper").cells}


def _settings(config: Config) -> dict[str, Any]:
    """All but the run's name."""
    return config.model_dump(exclude={"name"})


def _memory(c: Config) -> tuple[object, ...]:
    assert c.memory
    m = c.memory
    return (m.keys, c.slots, m.heads, m.knn, m.query.dim, m.query.norm, m.place)


def _is_the_ablation_model(c: Config) -> None:
    assert (c.model.layers, c.model.heads, c.memory_layers) == (6, 8, (5,))


def _keys(section: object, prefix: str = "") -> set[str]:
    if not isinstance(section, dict):
        return {prefix}
    return {key for name, child in section.items() for key in _keys(child, f"{prefix}.{name}")}


def _described_section(setting: dict[str, Any], definitions: dict[str, Any]) -> bool:
    names = re.findall(r"#/\$defs/(\w+)", str(setting))
    return bool(names) and all("description" in definitions[name] for name in names)


class TestRates:
    def test_auto_becomes_a_number_that_the_run_keeps(self, tmp_path) -> None:
        groups = ("dense", "embeddings", "addressing", "values")
        config = loaded(tmp_path, MINIMAL + MEMORY, *(f"optim.{group}.lr=auto" for group in groups))
        assert {group: getattr(config.optim, group).lr for group in groups} == recipe.learning_rates(64)
        again = Config.model_validate(config.model_dump())
        assert again == config

    def test_a_ratio_to_an_automatic_rate_is_of_its_number(self, tmp_path) -> None:
        config = loaded(tmp_path, MINIMAL, "optim.dense.lr=auto", "optim.embeddings.lr=3x")
        assert config.optim.group("embeddings").lr == pytest.approx(3 * recipe.learning_rates(64)["dense"])

    @pytest.mark.parametrize("text", ["x", "-2x", "2 x", "2y", "fast"])
    def test_what_is_no_rate_is_refused_with_what_is(self, tmp_path, text) -> None:
        with pytest.raises(UserErrors, match=r"optim.embeddings.lr must be .*a ratio to optim.dense.lr, as 15x.* auto"):
            loaded(tmp_path, MINIMAL, f"optim.embeddings.lr={text}")


def numbers_of(node: SchemaNode, prefix: str = "") -> list[tuple[str, SchemaNode]]:
    """Every setting that may be a number."""
    found = []
    for key, child in (node.section({}) or {}).items():
        found += [(prefix + key, child)] if child.kinds & {"integer", "number"} else []
        found += numbers_of(child, f"{prefix}{key}.")
    return found


class TestNumbers:
    @pytest.mark.parametrize(
        "value", [".inf", "-.inf", ".nan", "1e999", "-1", "9" * 30 + ".5e300", "1e999x", "0x", "1e-99x"]
    )
    def test_that_are_not_finite_or_below_zero_are_refused_everywhere(self, tmp_path: Path, value: str) -> None:
        settings = [key for key, _ in numbers_of(SchemaNode.by(Config))]
        assert len(settings) > 45 and "optim.addressing.weight_decay" in settings
        with pytest.raises(UserErrors) as caught:
            loaded(tmp_path, MINIMAL + MEMORY, *(f"{key}={value}" for key in settings))
        said = str(caught.value)
        assert [key for key in settings if f"- argument '{key}={value}': {key}" not in said] == []

    def test_whole_ones_that_no_computer_counts_to_are_refused_everywhere(self, tmp_path: Path) -> None:
        settings = [key for key, node in numbers_of(SchemaNode.by(Config)) if "integer" in node.kinds]
        with pytest.raises(UserErrors) as caught:
            loaded(tmp_path, MINIMAL + MEMORY, *(f"{key}={10**25}" for key in settings))
        assert [key for key in settings if f"{key}={10**25}': {key}" not in str(caught.value)] == []

    @pytest.mark.parametrize(
        "setting", ["optim.dense.eps=1e-320", "optim.values.lr=1e39", "optim.dense.weight_decay=1e-50"]
    )
    def test_that_fp32_makes_zero_or_infinite_are_refused(self, tmp_path: Path, setting: str) -> None:
        with pytest.raises(UserErrors, match="in fp32"):
            loaded(tmp_path, MINIMAL, setting)
        assert loaded(tmp_path, MINIMAL, "optim.dense.weight_decay=0").optim.dense.weight_decay == 0


@pytest.mark.parametrize(
    ("setting", "meant"),
    [("device=gpu", "cuda"), ("precision=float16", "fp16"), ("precision=half", "fp16"), ("precision=bfloat16", "bf16")],
)
def test_what_other_programs_call_a_choice_is_known(tmp_path: Path, setting: str, meant: str) -> None:
    (tmp_path / "c.yaml").write_text(MINIMAL)
    with pytest.raises(UserErrors) as caught:
        load(tmp_path / "c.yaml", [setting])
    assert caught.value.errors[0].fix == f"did you mean {meant}?"


def test_an_empty_section_as_an_argument_is_the_section_with_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MINIMAL)
    log = load(tmp_path / "c.yaml", ("log.wandb={}", "log.mlflow={}")).config.log
    assert log.wandb == WandbConfig() and log.mlflow == MlflowConfig()
