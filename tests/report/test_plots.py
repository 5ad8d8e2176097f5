"""Plots of grids: nothing empty is drawn, both files are whole, and a dark page has its own colours."""

from __future__ import annotations

import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from pkm.report import plots as module
from pkm.report.plots import COLOURS, GROUND, INK, ORDERED, RULE, SOFT, Plot, plots
from pkm.report.results import read_results
from tests.report.made_up import cell, grid, write_all, write_run

SVG = "{http://www.w3.org/2000/svg}"


def drawn(name: str, runs: Path, seeds: tuple[int, ...] = (1,)) -> dict[str, Plot]:
    """The plots of a grid that has run to its end, by name."""
    made = grid(name, runs, "cpu")
    write_all(made, seeds)
    found, undrawn = plots(read_results(made, seeds))
    assert undrawn == []
    return {plot.name: plot for plot in found}


def texts(plot: Plot) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(plot.svg).iter(f"{SVG}text")]


@pytest.fixture(scope="module")
def table2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plot]:
    return drawn("table2", tmp_path_factory.mktemp("runs"), (1, 2))


class TestTheFiles:
    def test_may_bear_a_name_that_begins_with_a_digit(self) -> None:
        svg = module.compact('<svg a="b">\n<path id="p"/><use href="#p"/></svg>', "2-rates", "caption")
        assert 'id="2-rates-p"' in svg and 'href="#2-rates-p"' in svg

    def test_are_those_of_the_papers_figures_and_the_curves(self, table2: dict[str, Plot]) -> None:
        assert list(table2) == ["table2-perplexity", "table2-usage", "table2-kl", "table2-training"]

    def test_are_whole_pictures(self, table2: dict[str, Plot]) -> None:
        for plot in table2.values():
            ElementTree.fromstring(plot.svg)
            picture = Image.open(io.BytesIO(plot.png))
            picture.load()
            assert min(picture.size) > 300

    def test_have_a_title_for_those_who_cannot_see_them(self, table2: dict[str, Plot]) -> None:
        for plot in table2.values():
            root = ElementTree.fromstring(plot.svg)
            title = root.find(f"{SVG}title")
            assert title is not None and title.text == plot.caption
            assert (root.get("role"), root.get("aria-labelledby")) == ("img", title.get("id"))

    def test_ask_for_no_other_address(self, table2: dict[str, Plot]) -> None:
        for plot in table2.values():
            assert set(re.findall(r"https?://[^\"]*", plot.svg)) == {
                "http://www.w3.org/2000/svg",
                "http://www.w3.org/1999/xlink",
            }, "names of XML namespaces only"

    def test_share_no_id_so_that_one_page_holds_all(self, table2: dict[str, Plot]) -> None:
        ids = [found for plot in table2.values() for found in re.findall(r'\bid="([^"]+)"', plot.svg)]
        assert len(ids) == len(set(ids))
        for plot in table2.values():
            asked = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', plot.svg))
            assert asked <= set(re.findall(r'\bid="([^"]+)"', plot.svg))


class TestWhatIsShown:
    def test_is_ours_beside_the_papers_at_the_sizes_of_each(self, table2: dict[str, Plot]) -> None:
        shown = texts(table2["table2-perplexity"])
        assert {"ours", "the paper’s", "32²", "256²", "1024²", "BatchNorm: no", "BatchNorm: yes", "no memory"} <= set(
            shown
        )

    def test_says_what_bars_are(self, table2: dict[str, Plot]) -> None:
        assert "standard deviation over 2 seeds" in table2["table2-usage"].caption

    def test_has_every_head_as_a_line_over_k(self, tmp_path: Path) -> None:
        shown = texts(drawn("heads_knn", tmp_path)["heads_knn-usage"])
        assert {"1 heads", "2 heads", "4 heads", "8 heads", "k"} <= set(shown)

    def test_labels_speed_against_perplexity_as_the_paper_does(self, tmp_path: Path) -> None:
        found = drawn("speed_perplexity", tmp_path)["speed_perplexity-perplexity"]
        assert {"4", "4+1", "4+2", "4+3", "5+2", "8+1"} <= set(texts(found))

    def test_names_how_many_cells_it_lacks(self, tmp_path: Path) -> None:
        table3 = grid("table3", tmp_path)
        write_run(cell(table3, "position-2"))
        found, _ = plots(read_results(table3, [1]), training=False)
        assert all("5 of 6 cells have no number yet" in plot.caption for plot in found)


class TestNothingEmpty:
    def test_is_drawn_before_a_cell_has_run(self, tmp_path: Path) -> None:
        for name, words in (("table3", "perplexity"), ("speed_perplexity", "words a second")):
            found, undrawn = plots(read_results(grid(name, tmp_path), [1]))
            assert found == []
            assert any(words in text for text in undrawn)
            assert all("no plot yet" in text for text in undrawn)

    def test_is_drawn_of_a_grid_of_one_cell_but_its_curve(self, tmp_path: Path) -> None:
        one = grid("one_billion_word", tmp_path)
        write_all(one)
        found, undrawn = plots(read_results(one, [1]))
        assert [plot.name for plot in found] == ["one_billion_word-training"]
        assert all("single cell" in text for text in undrawn)

    def test_is_hidden_where_matplotlib_is_not_installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
        found, undrawn = plots(read_results(grid("table3", tmp_path), [1]))
        assert found == []
        assert "pip install" in undrawn[0]


def contrast(one: str, other: str) -> float:
    """WCAG 2.1's contrast ratio of two colours, 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


class TestColours:
    def test_all_have_one_for_a_dark_page(self, table2: dict[str, Plot]) -> None:
        pairs = {light for light, _ in (GROUND, INK, SOFT, RULE, *COLOURS, *ORDERED)}
        for plot in table2.values():
            used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", re.sub("<style>.*?</style>", "", plot.svg)))
            assert used <= pairs
            assert all(f"fill: {colour}" in plot.svg for colour in used)

    @pytest.mark.parametrize("page", (0, 1), ids=("light", "dark"))
    def test_stand_out_from_the_page(self, page: int) -> None:
        assert all(contrast(colour[page], GROUND[page]) >= 4.5 for colour in (INK, SOFT)), "text (WCAG AA)"
        assert all(contrast(colour[page], GROUND[page]) >= 3 for colour in COLOURS), "lines (WCAG 1.4.11)"
        assert all(contrast(colour[page], GROUND[page]) >= 2.5 for colour in ORDERED), "each also has its marker"

    def test_are_never_all_that_tells_two_lines_apart(self, tmp_path: Path) -> None:
        result = read_results(grid("table1", tmp_path), [1])
        styles = module.line_styles(result, ("layers", "dim"))
        assert len({(style["marker"], style["linestyle"]) for style in styles.values()}) == len(styles) == 6
        curves = list(module.curves(result))
        assert len({(curve.marker, curve.dash) for curve in curves}) == len(curves) == 14
