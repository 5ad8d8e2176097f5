"""The paper's tables as grids: their printed numbers, and scales that change sizes but never the comparison."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from pkm.config.load import load as load_file
from pkm.config.schema import load
from pkm.errors import UserError, UserErrors
from pkm.experiments.grid import FOLDER, Cell, Grid, GridSettings, coordinate, load_grid, names, run_name, scales
from pkm.experiments.jobs import differing
from tests.support.tiny import MINIMAL, tiny_config

GOLDEN = yaml.safe_load((Path(__file__).parents[1] / "golden" / "tables.yaml").read_text(encoding="utf-8"))
MEASURES = {"ppl": "perplexity", "usage": "usage", "kl": "kl", "kwords_per_s": "kwords_per_s"}
DISTINCT = ("table1", "table2", "table3", "table4", "heads_knn", "one_billion_word")
SAME_RUNS = {"speed_memory": "table4", "speed_perplexity": "table1"}


@pytest.fixture(scope="module")
def grid():
    """A grid at a scale, loaded once."""
    known: dict[tuple[str, str], Grid] = {}

    def get(name: str, scale: str = "paper") -> Grid:
        if (name, scale) not in known:
            known[name, scale] = load_grid(name, scale)
        return known[name, scale]

    return get


def printed(cell: Cell) -> dict[str, float]:
    return cell.printed.model_dump(exclude_none=True)


class TestPaper:
    @pytest.mark.parametrize(
        ("name", "table", "axes"),
        [
            ("table1", "table1_cc_news", ("layers", "dim", "memories")),
            ("table2", "table2_memory_size_batchnorm", ("slots", "batchnorm")),
            ("table3", "table3_memory_position", ("position",)),
            ("table4", "table4_product_vs_flat_keys", ("slots", "keys")),
        ],
    )
    def test_every_cell_has_the_papers_settings_and_the_numbers_it_prints(self, grid, name, table, axes) -> None:
        cells = [(tuple(coordinate(cell.original, axis) for axis in axes), printed(cell)) for cell in grid(name).cells]
        golden = [
            (
                tuple(row.get(axis) for axis in axes),
                {ours: row[theirs] for theirs, ours in MEASURES.items() if theirs in row},
            )
            for row in GOLDEN[table]
        ]
        assert cells == golden

    def test_what_the_paper_only_timed_is_not_trained(self, grid) -> None:
        for cell in grid("table4").cells:
            assert cell.trained == ("perplexity" in printed(cell))
        assert all(cell.trained for name in DISTINCT[:3] for cell in grid(name).cells)

    def test_the_one_billion_word_run_is_the_papers(self, grid) -> None:
        (cell,) = grid("one_billion_word").cells
        golden = GOLDEN["one_billion_word"]
        assert printed(cell) == {"train_perplexity": golden["train_ppl"], "perplexity": golden["test_ppl"]}
        assert (cell.original.model.layers, cell.original.model.dim, cell.original.memory) == (16, 1024, None)
        assert cell.original.evaluate.train_documents > 0

    def test_heads_and_selected_keys_cover_the_pairs_of_the_papers_text(self, grid) -> None:
        pairs = {(c.original.memory.heads, c.original.memory.knn): printed(c) for c in grid("heads_knn").cells}
        assert set(pairs) == {(h, k) for h in (1, 2, 4, 8) for k in (8, 16, 32, 64)}
        # "usage around 70 %, perplexity around 20.5"
        assert all(pairs[pair] == {"perplexity": 20.5, "usage": 70} for pair in ((1, 64), (2, 32), (4, 16), (8, 8)))

    def test_the_figures_on_speed_are_of_the_runs_of_their_tables(self) -> None:
        for names_of in SAME_RUNS.items():
            figure, table = (load_file(FOLDER / f"{name}.yaml", (), GridSettings).config for name in names_of)
            assert (figure.start, figure.cells) == (table.start, table.cells)
            assert "kwords_per_s" in figure.measures

    def test_all_grids_and_scales_are_there(self) -> None:
        assert names() == [*DISTINCT[:5], "one_billion_word", "speed_memory", "speed_perplexity"]
        assert scales() == ["cpu", "gpu", "gpu-quick", "paper", "smoke"]


AXES = {
    "table1": {"model.layers", "model.dim", "memory"},
    "table2": {"memory.sub_keys", "memory.query.norm", "memory"},
    "table3": {"memory.layers"},
    "table4": {"memory.keys", "memory.sub_keys", "memory.slots"},
    "heads_knn": {"memory.heads", "memory.knn"},
    "one_billion_word": set(),
}


@pytest.mark.parametrize("scale", scales())
@pytest.mark.parametrize("name", DISTINCT)
class TestScales:
    def test_cells_differ_in_what_the_paper_compares_and_in_nothing_else(self, grid, name: str, scale: str) -> None:
        for changed in differing([cell.config for cell in grid(name, scale).cells]):
            keys = {setting.partition("=")[0] for setting in changed}
            # A cell may have one memory more or less: then every setting of a memory comes and goes with it. Rates that are
            # auto follow the width.
            allowed = AXES[name] | ({"memory.count"} if "memory" in AXES[name] else set())
            if "model.dim" in keys:
                allowed |= {
                    setting.partition("=")[0]
                    for setting in grid(name, scale).scale_settings.set
                    if "lr=auto" in setting
                }
            assert keys <= allowed

    def test_two_cells_are_as_far_apart_as_the_papers(self, grid, name: str, scale: str) -> None:
        """Which is larger, or whether they are the same, on every axis: at a scale as in the paper."""
        axes = ("layers", "dim", "memories", "slots", "position", "heads", "knn", "keys", "batchnorm")
        cells = grid(name, scale).cells
        for axis in axes:
            if axis == "position" and name != "table3":
                continue
            before = [coordinate(cell.original, axis) for cell in cells]
            now = [coordinate(cell.config, axis) for cell in cells]
            # One-to-one: neither are two of the paper's sizes the same here, nor one of them two. (Layer widths of two
            # tables may meet, but not those within one.)
            assert len(set(zip(before, now, strict=True))) == len(set(before)) == len(set(now)), axis
            numbers = [(b, n) for b, n in zip(before, now, strict=True) if type(b) is int and type(n) is int]
            assert [n for _, n in sorted(numbers)] == sorted(n for _, n in numbers), axis

    def test_every_cell_has_a_run_directory_of_its_own_that_its_arguments_name(
        self, grid, name: str, scale: str
    ) -> None:
        cells = grid(name, scale).cells
        runs = [cell.run(seed) for cell in cells for seed in (1, 2)]
        assert len({config.directory for config, _ in runs}) == len(runs)
        config, arguments = runs[-1]
        assert load(cells[-1].file, arguments).config == config


class TestNames:
    def test_the_same_settings_on_the_same_corpus_are_the_same_run_wherever_it_lies(
        self, tiny_corpus_path, tmp_path
    ) -> None:
        moved = tmp_path / "moved"
        shutil.copytree(tiny_corpus_path, moved)
        here, there, elsewhere = (
            run_name(tiny_config(corpus={"path": str(path)})) for path in (tiny_corpus_path, moved, tmp_path / "other")
        )
        assert here == there != elsewhere

    def test_what_alters_no_number_alters_no_name_and_the_rest_does(self) -> None:
        free = {
            "checkpoint": {"keep": 9},
            "log": {"every_steps": 1},
            "max_minutes": 5,
            "runs": "elsewhere",
            "threads": 2,
        }
        assert run_name(tiny_config(**free)) == run_name(tiny_config())
        rest = ({}, {"optim": {"steps": 21}}, {"seed": 2}, {"precision": "bf16"}, {"memory": {"knn": 2}})
        assert len({run_name(tiny_config(**changed)) for changed in rest}) == 5


class TestFiles:
    def test_settings_of_a_memory_win_where_there_is_one(self, grid) -> None:
        cells = load_grid("table2", "smoke", ["memory.kernels=reference", "optim.steps=7"]).cells
        assert {cell.config.optim.steps for cell in cells} == {7}
        assert {cell.config.memory.kernels if cell.config.memory else None for cell in cells} == {"reference", None}
        assert sum(cell.config.memory is None for cell in cells) == 1

    def test_a_size_that_a_scale_does_not_know_is_refused_with_its_line_to_add(self, tmp_path: Path) -> None:
        (tmp_path / "small.yaml").write_text("about: Too small.\ndim: {256: 16}\n")
        with pytest.raises(UserError, match=r"scale small: .*model.dim = 512[\s\S]*add `512: SIZE` to dim"):
            load_grid("table3", str(tmp_path / "small.yaml"))

    def test_a_grid_elsewhere_may_start_from_the_papers_models_or_from_its_own(self, tmp_path: Path) -> None:
        text = "title: T\nabout: A.\nstart: {}\nrows: [heads]\nmeasures: [kl]\ncells:\n  - {{name: a, set: [memory.heads=2]}}\n"
        path = tmp_path / "mine.yaml"
        path.write_text(text.format("ablation.yaml"))
        assert coordinate(load_grid(str(path), "smoke").cells[0].config, "heads") == 2
        (tmp_path / "ablation.yaml").write_text(
            "name: x\ncorpus: {path: p, context: 8}\nmodel: {layers: 3, dim: 512, heads: 2}\n"
            "memory: {layers: [1], sub_keys: 512, heads: 8, knn: 32}\noptim: {steps: 1, batch_tokens: 8}\n"
        )
        (tmp_path / "mine2.yaml").write_text("about: As it is.\n")
        mine = load_grid(str(path), str(tmp_path / "mine2.yaml"))
        assert (mine.name, mine.scale, mine.cells[0].config.model.layers) == ("mine", "mine2", 3)

    def test_mistakes_in_a_grid_are_told_with_their_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text("title: T\nabout: A.\nstart: ablation.yaml\nrows: [head]\nmeasure: [kl]\ncells: []\n")
        with pytest.raises(UserErrors) as caught:
            load_grid(str(path), "smoke")
        text = str(caught.value)
        assert "mine.yaml:4" in text and "mine.yaml:5" in text and "measures" in text


GRID_OF_RATES = """
title: t
about: a
start: dense.yaml
rows: [optim.dense.lr]
columns: [optim.embeddings.lr, memory.sub_keys]
measures: [perplexity]
cells:
  - {name: slow, set: [optim.dense.lr=1e-3]}
  - {name: fast, set: [optim.embeddings.lr=10x]}
"""


class TestSettingsAsCoordinates:
    def test_any_setting_tells_cells_apart_and_a_dense_model_has_no_place_on_its_memorys(self, tmp_path) -> None:
        (tmp_path / "dense.yaml").write_text(MINIMAL)
        (tmp_path / "rates.yaml").write_text(GRID_OF_RATES)
        grid = load_grid(str(tmp_path / "rates.yaml"), "paper")
        keys = (*grid.settings.rows, *grid.settings.columns)
        assert [tuple(coordinate(cell.config, key) for key in keys) for cell in grid.cells] == [
            (1e-3, "1x", None),
            (2.5e-4, "10x", None),
        ]

    def test_what_is_neither_a_name_nor_a_dotted_key_is_refused_with_the_names_there_are(self, tmp_path) -> None:
        (tmp_path / "dense.yaml").write_text(MINIMAL)
        (tmp_path / "rates.yaml").write_text(GRID_OF_RATES.replace("[optim.dense.lr]", "[width]"))
        with pytest.raises(UserErrors, match=r"rates.yaml:5: .*layers, dim, memories"):
            load_grid(str(tmp_path / "rates.yaml"), "paper")
