"""The comparison of memories (configs/memories)."""

import pytest

from pkm.errors import UserError
from pkm.experiments.grid import coordinate, load_grid
from pkm.experiments.jobs import differing
from pkm.model.cost import parameters

VOCABULARY = 2495


@pytest.fixture(scope="module")
def cells():
    return {cell.name: cell for cell in load_grid("memories", "cpu").cells}


def test_all_memories_have_tables_of_one_size(cells):
    budget = 128**2 * 32
    for name, cell in cells.items():
        if cell.config.memory:
            assert parameters(cell.config, VOCABULARY).values == pytest.approx(budget, rel=0.012), name
    dense, experts = (parameters(cells[name].config, VOCABULARY).total for name in ("dense", "experts"))
    assert experts - dense == pytest.approx(budget, rel=0.05)


def test_all_are_trained_alike(cells):
    assert len({cell.config.optim.model_dump_json() for cell in cells.values()}) == 1
    assert len({(cell.config.model.layers, cell.config.model.dim) for cell in cells.values()}) == 1


def test_a_plan_tells_experts_from_the_dense_model(cells):
    dense, experts = differing([cells[name].config for name in ("dense", "experts")])
    assert dense == () and {"model.experts.count=33", "model.experts.active=2"} <= set(experts)


def test_a_row_is_called_after_its_cell(cells):
    assert [coordinate(cell.config, "name") for cell in cells.values()] == list(cells)
    assert [coordinate(cell.original, "name") for cell in cells.values()] == list(cells)


def test_it_has_sizes_of_one_scale_and_is_refused_at_others():
    with pytest.raises(UserError, match=r"sizes of scale cpu, not of smoke\n  fix: --scale cpu"):
        load_grid("memories", "smoke")
