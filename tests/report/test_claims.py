"""Claims of the paper, on results made up on disk: in worlds where they hold, where they do not, and where nobody can tell."""

import json
import math
import random
import shutil
from dataclasses import replace
from functools import cache

import pytest

from pkm.experiments.grid import load_grid
from pkm.report.claims import CLAIMS, findings
from pkm.report.results import read_results
from pkm.report.statistics import fit, kendall, student

GRIDS = list(CLAIMS)
SEEDS = (1, 2, 3)


def as_printed(cell, seed):
    """What the paper prints for a cell, and plausible numbers where it prints none."""
    numbers = {key: value for key, value in cell.printed.model_dump().items() if value is not None}
    config = cell.original
    if config.memory and cell.name.startswith("h"):
        reads = config.memory.heads * config.memory.knn
        numbers = {"usage": 15 * math.log2(reads) - 20, "perplexity": 24 - 0.5 * math.log2(reads)}
    elif cell.name.endswith("mem"):
        numbers["kwords_per_s"] = 400 / config.model.layers * (0.97 if config.memory else 1)
    return numbers


def upside_down(cell, seed):
    """A world in which the paper is wrong throughout."""
    numbers = as_printed(cell, seed)
    config = cell.original
    m = config.memory
    if "usage" in numbers:
        numbers["usage"] = 110 - numbers["usage"]
    if "kl" in numbers:
        numbers["kl"] = 3.5 - numbers["kl"]
    if "perplexity" in numbers:
        numbers["perplexity"] = numbers.get("train_perplexity") or 400 / numbers["perplexity"]
    if cell.name.startswith("position"):
        numbers["perplexity"] = {1: 19.0, 6: 18.0}.get(m.layers[0], 20.0)
    if cell.name.startswith("h"):
        numbers["usage"] = 90 - 5 * m.heads - m.knn / 4
        numbers["perplexity"] = 20 * 1.02**m.heads * 1.001**m.knn
    if cell.name.startswith(("flat", "product")):
        numbers["kwords_per_s"] = 36 if m.keys == "flat" else 4e5 / config.slots
    elif "kwords_per_s" in numbers:
        numbers["kwords_per_s"] = 10.0 if config.memory else 40.0
    return numbers


def noise(cell, seed):
    """A world in which nothing but the seed matters, or two timings contradict each other."""
    chance = random.Random(f"{cell.name} {seed}")
    numbers = {key: chance.uniform(30, 60) for key in as_printed(cell, seed)}
    config = cell.original
    if "train_perplexity" in numbers:
        numbers["perplexity"] = numbers["train_perplexity"] * (1.0, 1.1, 1.25)[seed - 1]
    if cell.name.startswith(("flat", "product")):
        zigzag = round(math.sqrt(config.slots)) // 128 % 3
        step = 5 * zigzag * (-1) ** zigzag
        numbers["kwords_per_s"] = 20 - step if config.memory.keys == "flat" else 40 + step
    elif "kwords_per_s" in numbers:
        slow = config.model.dim == 1024
        numbers["kwords_per_s"] = (20.0 if slow else 80.0) if config.memory else 40.0
    return numbers


@pytest.fixture(scope="module")
def grids(tmp_path_factory):
    """(name, scale) -> grid, loaded once, with its runs in a folder that `world` empties."""
    runs = tmp_path_factory.mktemp("runs")
    return cache(lambda name, scale: load_grid(name, scale, [f"runs={runs}"]))


@pytest.fixture
def world(grids):
    """Writes a grid's runs to disk, as far as `numbers(cell, seed)` gives some, and reads them back."""

    def make(name, numbers, seeds=SEEDS, jitter=0.0005, scale="paper", states=None):
        grid = grids(name, scale)
        shutil.rmtree(grid.cells[0].config.runs, ignore_errors=True)
        for cell in grid.cells:
            for seed in seeds if cell.trained else seeds[:1]:
                config, _ = cell.run(seed)
                found = numbers(cell, seed)
                if not found:
                    continue
                chance = random.Random(f"{cell.name} {seed} jitter")
                found = {key: value * (1 + chance.uniform(-jitter, jitter)) for key, value in found.items()}
                config.directory.mkdir(parents=True)
                write_run(config, found, (states or {}).get(cell.name, "finished"))
        return read_results(grid, seeds)

    return make


def write_run(config, numbers, state):
    def write(name, record):
        (config.directory / name).write_text(json.dumps(record))

    write("status.json", {"state": state, "step": config.optim.steps, "reason": "by the test"})
    if "kwords_per_s" in numbers:
        write("speed.json", {"words_per_second": 1000 * numbers["kwords_per_s"]})
    if "perplexity" in numbers:
        memories = {"5": {"percent": numbers["usage"], "kl": numbers.get("kl", 1.0)}} if "usage" in numbers else {}
        training = {"perplexity": numbers["train_perplexity"]} if "train_perplexity" in numbers else None
        evaluation = {"perplexity": numbers["perplexity"], "memories": memories}
        write("report.json", {"evaluation": evaluation, "training": training, "speed": None})


def verdicts(result):
    return {finding.claim: finding.verdict for finding in findings(result)}


@pytest.mark.parametrize("grid", GRIDS)
class TestEveryClaim:
    def test_holds_where_the_papers_numbers_are_found(self, world, grid):
        found = verdicts(world(grid, as_printed))
        assert found == dict.fromkeys(dict(CLAIMS[grid]), "holds")

    def test_does_not_hold_where_the_opposite_is_found(self, world, grid):
        found = verdicts(world(grid, upside_down))
        assert found == dict.fromkeys(dict(CLAIMS[grid]), "does not hold")

    def test_is_undecided_where_seeds_differ_more_than_cells(self, world, grid):
        found = verdicts(world(grid, noise))
        assert found == dict.fromkeys(dict(CLAIMS[grid]), "undecided")

    def test_is_not_run_where_nothing_was_and_the_cells_are_named(self, world, grid):
        result = world(grid, lambda cell, seed: None)
        for finding in findings(result):
            assert finding.verdict == "not run"
            assert "not run: " in finding.evidence and any(c.cell.name in finding.evidence for c in result.cells)


class TestWhatDecides:
    def test_one_seed_leaves_a_difference_undecided_and_says_its_direction_and_size(self, world):
        found = {f.claim: f for f in findings(world("table2", as_printed, seeds=(1,), jitter=0))}
        finding = found["BatchNorm raises the usage of large memories"]
        assert finding.verdict == "undecided"
        assert "25.8 % → 80.3 %" in finding.evidence
        assert "+46.7 points, in the claim's direction; one seed: spread unknown" in finding.evidence
        finding = {f.claim: f for f in findings(world("table2", upside_down, seeds=(1,)))}[finding.claim]
        assert finding.verdict == "undecided" and "against the claim's direction" in finding.evidence

    def test_one_seed_decides_a_trend_over_six_sizes_by_its_exact_p(self, world):
        claim = "more slots lower perplexity, with BatchNorm on the query"
        for numbers, verdict in ((as_printed, "holds"), (upside_down, "does not hold")):
            finding = {f.claim: f for f in findings(world("table2", numbers, seeds=(1,)))}[claim]
            assert finding.verdict == verdict
            assert "exact p = 0.0028; one seed" in finding.evidence  # 2 / 6!

    def test_two_seeds_of_two_cells_are_judged_by_the_spread_of_the_whole_table(self, world):
        finding = findings(world("table2", as_printed, seeds=(1, 2)))[2]
        assert finding.verdict == "holds" and "over 2 seeds in 13 cells" in finding.evidence

    def test_seeds_of_some_cells_only_serve_all(self, world):
        def some(cell, seed):
            return as_printed(cell, seed) if seed == 1 or cell.name == "no-memory" else None

        finding = findings(world("table2", some, jitter=0.001))[2]
        assert finding.verdict == "holds" and "1 to 3 seeds" in finding.evidence

    def test_the_papers_numbers_stand_beside_in_its_own_sizes(self, world):
        finding = findings(world("table2", as_printed, scale="cpu"))[3]
        ours, paper = finding.evidence.split("Paper: ")
        assert "25.8 % → 80.3 % (1024^2 slots)" in paper and "1024" not in ours

    def test_a_failed_cell_is_named_and_the_others_are_judged(self, world):
        result = world("table2", as_printed, states={"512x512-batchnorm": "failed"})
        first = findings(result)[0]
        assert first.verdict == "holds" and "(failed: 512x512-batchnorm)" in first.evidence

    def test_a_running_cell_that_a_claim_cannot_do_without_leaves_it_not_run(self, world):
        result = world("table3", as_printed, states={"position-1": "running"})
        found = findings(result)
        assert [f.verdict for f in found] == ["not run", "not run", "not run"]
        assert "running: position-1" in found[0].evidence

    def test_flat_keys_that_are_only_timed_are_not_missed_in_perplexity(self, world):
        for finding in findings(world("table4", as_printed)):
            assert "flat-512x512" not in finding.evidence

    def test_a_grid_without_claims_has_no_findings(self, world):
        result = world("table3", as_printed)
        assert findings(replace(result, grid=replace(result.grid, name="mine"))) == []

    def test_a_middle_position_must_beat_both_ends(self, world):
        for first, verdict in ((24.0, "holds"), (15.0, "does not hold")):
            ppl = {1: first, 6: 22.0}
            result = world("table3", lambda c, s, ppl=ppl: {"perplexity": ppl.get(c.config.memory_layers[0], 20.0)})
            assert findings(result)[2].verdict == verdict

    def test_the_cells_of_equal_reads_that_are_furthest_apart_are_judged_in_points_of_usage(self, world):
        def usage(cell, seed):
            m = cell.original.memory
            return {
                "usage": {(1, 64): 40.0, (8, 8): 75.0, (1, 16): 2.0, (2, 8): 5.0}.get((m.heads, m.knn), 50.0),
                "perplexity": 20.0,
            }

        first = findings(world("heads_knn", usage))[0]
        assert first.verdict == "does not hold" and "40.0 % " in first.evidence and "75.0 % " in first.evidence

    def test_product_keys_that_are_slower_somewhere_are_not_faster(self, world):
        leads = dict(zip((128, 256, 384, 512, 768, 1024), (0.5, 0.63, 0.76, 0.86, 0.97, 1.13), strict=True))

        def speeds(cell, seed):
            side = round(math.sqrt(cell.original.slots))
            found = as_printed(cell, seed)
            return found | {"kwords_per_s": 10 * (leads[side] if cell.original.memory.keys == "product" else 1)}

        assert findings(world("speed_memory", speeds))[2].verdict == "undecided"


class TestStatistics:
    @pytest.mark.parametrize(
        ("freedom", "tails", "expected"),
        [(1, 0.05, 12.706), (2, 0.05, 4.303), (3, 0.05, 3.182), (4, 0.01, 4.604), (9, 0.05, 2.262), (30, 0.05, 2.042)],
    )
    def test_students_quantiles_are_those_of_printed_tables(self, freedom, tails, expected):
        assert student(freedom, tails) == pytest.approx(expected, abs=6e-4)

    def test_two_cells_are_the_paired_t_test_of_students_sleep_data(self):
        # Student (1908); mean difference 1.58, 95 % interval 0.7001 to 2.4599 as R's t.test(paired = TRUE) prints it.
        first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
        second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
        fitted = fit({"a": dict(enumerate(first)), "b": dict(enumerate(second))})
        weights = {"a": -1.0, "b": 1.0}
        effect, half = fitted.contrast(weights), fitted.half_width(weights)
        assert fitted.freedom == 9
        assert (effect, effect - half, effect + half) == pytest.approx((1.58, 0.7001142, 2.4598858), abs=1e-6)

    def test_cells_without_a_common_seed_are_compared_without_pairing(self):
        fitted = fit({"a": {1: 1.0, 2: 3.0}, "b": {3: 6.0, 4: 8.0}})
        assert fitted.contrast({"a": -1.0, "b": 1.0}) == pytest.approx(5.0)
        assert fitted.freedom == 2 and fitted.spread == pytest.approx(math.sqrt(2))

    def test_single_runs_have_no_spread(self):
        fitted = fit({"a": {1: 1.0}, "b": {1: 2.0}})
        assert fitted.freedom == 0 and fitted.half_width({"a": -1.0, "b": 1.0}) == math.inf

    @pytest.mark.parametrize(
        ("ys", "tau", "p"), [((1, 2, 3, 4, 5, 6), 1, 2 / 720), ((2, 1, 3, 4, 6, 5), 11 / 15, 0.056)]
    )
    def test_kendalls_p_is_that_of_printed_tables(self, ys, tau, p):
        # Kendall, Rank Correlation Methods, appendix table 1: for n = 6, P(S >= 11) = 0.028, P(S = 15) = 0.0014.
        found = kendall([list(enumerate(ys))])
        assert found[:2] == pytest.approx((tau, p), abs=6e-4)

    def test_rows_are_ranked_each_by_itself(self):
        tau, p, least = kendall([[(0, 1.0), (1, 2.0), (2, 3.0)], [(0, 11.0), (1, 12.0), (2, 13.0)]])
        assert (tau, p, least) == (1.0, 2 / 36, 2 / 36)

    def test_equal_values_are_ties(self):
        assert kendall([[(0, 100.0), (1, 100.0), (2, 100.0 + 1e-13)]]) == (0.0, 1.0, 1.0)
