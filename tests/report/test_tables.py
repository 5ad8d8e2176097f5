"""Tables of grids: ours beside the paper's, what is missing and why, in every format."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pkm.experiments.grid import names
from pkm.report.page import write_report
from pkm.report.results import GridResult, read_results
from pkm.report.tables import csv_rows, csv_table, grid_table, latex, latex_table
from tests.report.made_up import NASTY, cell, grid, write_all, write_run, write_speed


def nothing_run(name: str, tmp_path: Path, scale: str = "paper") -> GridResult:
    return read_results(grid(name, tmp_path, scale), [1])


def row(markdown: str, start: str) -> list[str]:
    """The cells of the first row of a Markdown table whose first ones are `start`."""
    lines = [
        [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in markdown.splitlines() if line[:1] == "|"
    ]
    wanted = [c.strip() for c in start.split("|")]
    return next(line for line in lines if line[: len(wanted)] == wanted)


# From the LaTeX source of the paper, rounded to the digits that these tables show.
PRINTED = {
    "table1": {"16 | 2": ["14.10"], "24 | 0": ["16.02", "13.95"], "12 | 1": ["15.62", "13.65"]},
    "table2": {
        "1024²": ["19.79", "25.8", "2.06", "17.98", "80.3", "0.95"],
        "128²": ["22.80", "100.0", "0.56", "22.97", "100.0", "0.56"],
        "no memory": ["22.98", "22.98"],
    },
    "table3": {"1": ["21.47", "100.0", "2.23"], "5": ["19.78", "97.9", "0.68"]},
    "table4": {
        "384²": ["22.15", "10.1", "2.77", "13.9", "20.70", "99.6", "0.65", "36.4"],
        "1024²": ["1.2", "17.98", "80.3", "0.95", "35.7"],
    },
    "heads_knn": {"8": ["20.50", "70.0"], "4": ["20.50", "70.0", "19.78", "97.9"]},
    "one_billion_word": {"16 | 1024": ["14.81", "25.27"]},
    "speed_memory": {"768²": ["4.7", "36.2"]},
    "speed_perplexity": {"12 | 3": ["14.47"]},
}


class TestThePapersNumbers:
    def test_every_grid_is_tried_here(self) -> None:
        assert sorted(PRINTED) == sorted(names())

    @pytest.mark.parametrize("name", PRINTED)
    def test_stand_in_their_rows_and_groups_before_anything_has_run(self, name: str, tmp_path: Path) -> None:
        table = grid_table(nothing_run(name, tmp_path))
        for start, numbers in PRINTED[name].items():
            found = re.findall(r"\(\*{0,2}([\d.,]+)\*{0,2}\)", " ".join(row(table, start)))
            assert found == numbers

    @pytest.mark.parametrize("name", PRINTED)
    def test_are_the_same_in_latex(self, name: str, tmp_path: Path) -> None:
        lines = latex_table(nothing_run(name, tmp_path)).splitlines()
        for start, numbers in PRINTED[name].items():
            head = " & ".join(latex(part.strip()) for part in start.split("|")) + " & "
            line = next(line for line in lines if line.startswith(head))
            assert re.findall(r"\((?:\\textbf\{)?([\d.,]+)\}?\)", line) == numbers

    def test_are_not_rounded_in_csv(self, tmp_path: Path) -> None:
        rows = {row["cell"]: row for row in csv_rows(nothing_run("table2", tmp_path))}
        assert rows["1024x1024-batchnorm"]["paper_perplexity"] == 17.9819
        assert rows["no-memory"]["paper_usage"] is None


class TestOurNumbers:
    def test_are_means_with_their_spread_over_seeds(self, tmp_path: Path) -> None:
        table3 = grid("table3", tmp_path)
        for seed, perplexity in ((1, 100.0), (2, 102.0), (3, 104.0)):
            write_run(cell(table3, "position-4"), seed, perplexity=perplexity, usage=80.0 + seed)
        table = grid_table(read_results(table3, [1, 2, 3]))
        assert row(table, "4")[1:3] == ["102.00 ± 2.00 (20.05)", "82.0 ± 1.0 (97.1)"]
        assert "over 3 seeds" in table

    def test_of_one_seed_have_no_spread(self, tmp_path: Path) -> None:
        table3 = grid("table3", tmp_path)
        write_run(cell(table3, "position-4"), perplexity=100.0)
        table = grid_table(read_results(table3, [1]))
        assert row(table, "4")[1] == "100.00 (20.05)"
        assert "±" not in table
        assert "pm" not in latex_table(read_results(table3, [1]))

    def test_are_bold_where_perplexity_is_lowest_of_a_dimension_in_table_1(self, tmp_path: Path) -> None:
        table1 = grid("table1", tmp_path)
        for number, one in enumerate(table1.cells):
            write_run(one, perplexity=100.0 - number)
        table = grid_table(read_results(table1, [1]))
        assert re.findall(r"\*\*([\d.]+)\*\* \(", table) == ["87.00", "88.00"]
        assert re.findall(r"\(\*\*([\d.]+)\*\*\)", table) == ["13.17", "14.10"], "as the paper prints them"

    def test_of_one_cell_alone_are_not_called_the_best(self, tmp_path: Path) -> None:
        one_billion = grid("one_billion_word", tmp_path)
        write_all(one_billion)
        assert "**" not in grid_table(read_results(one_billion, [1]))

    def test_of_the_model_without_a_memory_stand_in_both_groups(self, tmp_path: Path) -> None:
        table2 = grid("table2", tmp_path)
        write_run(cell(table2, "no-memory"), perplexity=30.0)
        table = grid_table(read_results(table2, [1]))
        assert row(table, "no memory")[1:] == ["30.00 (22.98)", "–", "–", "30.00 (22.98)", "–", "–"]

    def test_say_their_sizes_and_the_papers_where_a_scale_changed_them(self, tmp_path: Path) -> None:
        table = grid_table(nothing_run("table2", tmp_path, "cpu"))
        assert row(table, "32² (paper 128²)")
        assert "(paper" not in grid_table(nothing_run("table2", tmp_path)).split("\n- ")[0]
        header = grid_table(nothing_run("heads_knn", tmp_path, "cpu")).splitlines()[0]
        assert "k = 4 (paper 8): perplexity" in header

    def test_of_recall_have_their_spread_in_every_format_and_say_of_how_many_facts(self, tmp_path: Path) -> None:
        memories = grid("memories", tmp_path / "runs", "cpu")
        for seed in (1, 2):
            write_run(cell(memories, "PKM"), seed, recall=seed / 2)
            write_run(cell(memories, "dense"), seed)
        result = read_results(memories, [1, 2])
        table = grid_table(result)
        header = [head.strip() for head in table.splitlines()[0].split("|")[1:-1]]
        assert header[-1] == "recall (nats/token)" and row(table, "PKM")[-1] == "0.750 ± 0.354"
        assert row(table, "dense")[-1] == "–" and "not asked for facts yet: dense" in table
        assert "of 2,901 to 2,902 names, places and numbers" in table
        assert "0.750 $\\pm$ 0.354" in next(
            line for line in latex_table(result).splitlines() if line.startswith("PKM &")
        )
        rows = {one["cell"]: one for one in csv.DictReader(csv_table(result).splitlines())}
        assert (
            float(rows["PKM"]["recall"]) == 0.75
            and rows["PKM"]["recall_seeds"] == "2"
            and rows["dense"]["recall"] == ""
        )
        assert float(rows["PKM"]["recall_spread"]) == pytest.approx(0.125**0.5)
        html = write_report([result], tmp_path / "report")[0].read_text()
        assert re.search(r'>0\.750</span> <span class="spread">± 0\.354<', html) and "recall (nats/token)" in html
        assert (tmp_path / "report" / "plots" / "memories-recall.svg").exists()

    def test_of_speed_say_how_they_were_measured(self, tmp_path: Path) -> None:
        table4 = grid("table4", tmp_path)
        write_speed(cell(table4, "flat-512x512"), 7.5)
        table = grid_table(read_results(table4, [1]))
        assert row(table, "512²")[1:5] == ["–", "–", "–", "7.5 (7.7)"]
        assert "cpu, 1 threads, bf16, 16 windows of 128 tokens" in table
        assert "timed but not trained, as in the paper: flat-512x512" in table


class TestWhatIsMissing:
    def test_says_why_in_a_word_and_below_the_table_at_length(self, tmp_path: Path) -> None:
        table3 = grid("table3", tmp_path)
        write_run(cell(table3, "position-1"), state="failed", reason="out of\nmemory")
        write_run(cell(table3, "position-2"), state="running", reason="", step=1500)
        write_run(cell(table3, "position-3"), state="stopped", reason="SIGTERM")
        write_run(cell(table3, "position-4"))
        table = grid_table(read_results(table3, [1]))
        assert [row(table, str(n))[1].split(" (")[0] for n in range(1, 6)] == [
            "failed [1]",
            "running [2]",
            "stopped [3]",
            "20.00",
            "not run [4]",
        ]
        assert table.splitlines()[-4:] == [
            "- [1] failed (out of memory): position-1",
            "- [2] running, step 1,500 of 128,000: position-2",
            "- [3] stopped (SIGTERM): position-3",
            "- [4] not run: position-5, position-6",
        ]

    def test_of_one_seed_names_the_seed_and_keeps_the_mean_of_the_others(self, tmp_path: Path) -> None:
        table3 = grid("table3", tmp_path)
        for seed, perplexity in ((1, 100.0), (3, 104.0)):
            write_run(cell(table3, "position-1"), seed, perplexity=perplexity)
        write_run(cell(table3, "position-1"), 2, state="failed", reason="lost")
        result = read_results(table3, [1, 2, 3])
        table = grid_table(result)
        assert row(table, "1")[1] == "102.00 ± 2.83 [1] (21.47)"
        assert "- [1] seed 2 failed (lost): position-1" in table
        first = csv_rows(result)[0]
        assert (first["perplexity_seeds"], first["state"]) == (2, "finished; failed")

    def test_is_blank_where_the_grid_has_no_such_cell(self, tmp_path: Path) -> None:
        assert row(grid_table(nothing_run("table1", tmp_path)), "12 | 3")[3] == ""

    def test_is_said_once_when_nothing_has_run(self, tmp_path: Path) -> None:
        assert "- [1] not run: every cell" in grid_table(nothing_run("table2", tmp_path))

    def test_never_breaks_the_table_however_the_reason_reads(self, tmp_path: Path) -> None:
        table3 = grid("table3", tmp_path)
        write_run(table3.cells[0], state="failed", reason=NASTY)
        table = grid_table(read_results(table3, [1]))
        widths = {len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines() if line[:1] == "|"}
        assert len(widths) == 1
        assert r"\<script\>" in table
        assert r"a\|b" in table


class TestCsv:
    def test_has_a_line_a_cell_with_both_coordinates_and_the_runs(self, tmp_path: Path) -> None:
        table2 = grid("table2", tmp_path, "cpu")
        made = [write_run(cell(table2, "512x512-batchnorm"), seed, perplexity=300.0 + seed) for seed in (1, 2)]
        rows = list(csv.DictReader(csv_table(read_results(table2, [1, 2])).splitlines()))
        assert len(rows) == 13
        found = next(row for row in rows if row["cell"] == "512x512-batchnorm")
        assert (found["slots"], found["paper_slots"], found["batchnorm"]) == ("16384", "262144", "True")
        assert (found["perplexity"], found["perplexity_seeds"], found["state"]) == ("301.5", "2", "finished")
        assert float(found["perplexity_spread"]) == pytest.approx(0.5**0.5)
        assert found["runs"].split() == [str(path) for path in made]
        assert next(row for row in rows if row["cell"] == "no-memory")["reason"] == "not run"

    def test_keeps_a_nasty_reason_in_one_field(self, tmp_path: Path) -> None:
        table3 = grid("table3", tmp_path)
        write_run(table3.cells[0], state="failed", reason=NASTY)
        rows = list(csv.DictReader(csv_table(read_results(table3, [1])).splitlines()))
        assert rows[0]["reason"] == f"failed ({NASTY})"


def columns_of(line: str) -> int:
    """How many columns a line of a tabular fills."""
    spans = [int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line)]
    return len(re.findall(r"(?<!\\)&", line)) + 1 + sum(spans)


@pytest.fixture(params=PRINTED)
def latex_of_a_grid(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    made = grid(request.param, tmp_path, "cpu")
    write_all(made, (1, 2))
    write_run(made.cells[0], state="failed", reason=NASTY)
    return latex_table(read_results(made, [1, 2]))


class TestLatex:
    def test_is_a_booktabs_table_of_even_rows(self, latex_of_a_grid: str) -> None:
        text = re.sub(r"\\[\\{}%&#_$]", "", latex_of_a_grid)
        assert text.count("{") == text.count("}")
        assert text.count("$") % 2 == 0
        for part in ("table*", "tabular"):
            assert latex_of_a_grid.count(f"\\begin{{{part}}}") == latex_of_a_grid.count(f"\\end{{{part}}}") == 1
        rules = [rule for rule in re.findall(r"\\(\w+rule)\b", latex_of_a_grid) if rule != "cmidrule"]
        assert rules == ["toprule", "midrule", "bottomrule"]
        spec = latex_of_a_grid.split(r"\begin{tabular}{")[1].split("\n")[0]
        wanted = len(re.findall("[lr]", spec.replace(r"@{\hspace{3pt}}", "")))
        lines = [line for line in latex_of_a_grid.splitlines() if line.endswith(r"\\")]
        assert {columns_of(line) for line in lines} == {wanted}

    def test_is_compiled(self, latex_of_a_grid: str, tmp_path: Path) -> None:
        if not shutil.which("pdflatex"):
            pytest.skip("no pdflatex here")
        start = r"\documentclass{article}\usepackage{booktabs}\begin{document}"
        (tmp_path / "table.tex").write_text(start + latex_of_a_grid + r"\end{document}")
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:]


class TestPerplexitiesThatNoNumberHolds:
    def test_stand_as_such_in_every_format_and_no_mean_is_made_of_the_other_seeds(self, tmp_path: Path) -> None:
        tried = grid("table2", tmp_path)
        write_all(tried, (1, 2))
        name = next(one.name for one in tried.cells if one.config.memory)
        write_run(cell(tried, name), seed=2, perplexity=None)
        result = read_results(tried, [1, 2])
        one = next(one for one in result.cells if one.cell.name == name)
        assert one.mean("perplexity") is None and one.spread("perplexity") is None and one.mean("usage") is not None
        assert "> 1e300 [1]" in grid_table(result)
        assert "$>$ 1e300" in latex_table(result)
        found = next(row for row in csv_rows(result) if row["cell"] == name)
        assert found["perplexity"] is None and found["reason"] == "perplexity > 1e300" and found["state"] == "finished"
        assert write_report([result], tmp_path / "report")[0].exists()

    def test_and_the_largest_that_one_holds_are_drawn_and_written_with_an_exponent(self, tmp_path: Path) -> None:
        tried = grid("table2", tmp_path)
        write_all(tried, (1, 2))
        for seed in (1, 2):
            write_run(cell(tried, tried.cells[0].name), seed=seed, perplexity=seed * 4e299)
        result = read_results(tried, [1, 2])
        assert "6e+299 ± 2.83e+299" in grid_table(result)
        assert write_report([result], tmp_path / "report")[0].exists()
