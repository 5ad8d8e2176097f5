"""report.html and the files beside it: one file that asks for no other, whole, escaped, and honest about what is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pkm.errors import UserError
from pkm.report import page
from pkm.report.claims import Finding
from pkm.report.page import write_report
from pkm.report.results import GridResult, read_results
from tests.report.made_up import NASTY, cell, grid, write_all, write_run

FINDINGS = [
    Finding("More slots lower perplexity", "holds", f"From 32² to 256² slots. {NASTY}"),
    Finding("BatchNorm raises usage", "undecided", "One seed."),
]


@dataclass
class Page(HTMLParser):
    """What a test asks of a page."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"

    def all(self, *tags: str) -> Iterator[dict[str, str | None]]:
        return (attributes for tag, attributes in self.tags if tag in tags)


def parsed(path: Path) -> Page:
    found = Page()
    found.feed(path.read_text(encoding="utf-8"))
    return found


def results(runs: Path) -> list[GridResult]:
    """Table 2 done but for one failed cell, table 1 not begun."""
    table2, table1 = (grid(name, runs, "cpu") for name in ("table2", "table1"))
    write_all(table2)
    write_run(cell(table2, "384x384-plain"), state="failed", reason=NASTY)
    corpus = runs / "corpus"
    corpus.mkdir()
    splits = {"train": {"documents": 7, "words": 1234567, "tokens": 2345678, "bytes": 1}}
    (corpus / "manifest.json").write_text(json.dumps({"splits": splits}))
    return [read_results(made, [1]) for made in (table2, table1)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "findings", lambda result: FINDINGS if result.grid.name == "table2" else [])
        return write_report(results(tmp_path_factory.mktemp("runs")), tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def html(written: list[Path]) -> Page:
    return parsed(written[0])


class TestTheFiles:
    def test_are_the_page_first_then_each_tables_and_plots(self, written: list[Path]) -> None:
        folder = written[0].parent
        names = [str(path.relative_to(folder)) for path in written]
        assert names[0] == "report.html"
        wanted = {f"{name}.{kind}" for name in ("table2", "table1") for kind in ("md", "tex", "csv")}
        wanted |= {f"plots/table2-{m}.{k}" for m in ("perplexity", "usage", "kl", "training") for k in ("svg", "png")}
        assert set(names[1:]) == wanted
        assert all(path.stat().st_size > 100 for path in written)
        assert {path for path in folder.rglob("*") if path.is_file()} == set(written), "nothing half-written is left"

    def test_in_markdown_hold_the_findings_and_name_plots_that_are_there(self, written: list[Path]) -> None:
        text = (written[0].parent / "table2.md").read_text()
        assert "- **holds**: More slots lower perplexity." in text
        pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
        assert len(pictures) == 4
        assert all((written[0].parent / name).exists() for name in pictures)
        assert "no plot yet" in (written[0].parent / "table1.md").read_text()

    def test_are_refused_with_a_reason_where_there_can_be_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match="a file stands where a directory is needed"):
            write_report([read_results(grid("table3", tmp_path), [1])], tmp_path / "file")


class TestThePage:
    def test_asks_for_nothing_but_itself(self, written: list[Path], html: Page) -> None:
        loaded = [
            a[name] for _, a in html.tags for name in ("src", "srcset", "data", "poster", "action") if a.get(name)
        ]
        assert loaded == []
        assert list(html.all("script", "iframe", "object", "embed", "base", "form")) == []
        assert [a["href"] for a in html.all("link")] == ["data:,"], "which keeps a browser from asking for an icon"
        used = [a["xlink:href"] for a in html.all("use")]
        assert used and all(name and name.startswith("#") for name in used)
        text = written[0].read_text(encoding="utf-8")
        assert "@import" not in text
        assert all(address.startswith("#") for address in re.findall(r"url\(['\"]?([^)]*)", text))

    def test_links_to_places_in_it_and_files_beside_it(self, written: list[Path], html: Page) -> None:
        ids = [a["id"] for _, a in html.tags if a.get("id")]
        assert len(ids) == len(set(ids))
        for link in (a["href"] for a in html.all("a")):
            assert link is not None
            assert link[1:] in ids if link.startswith("#") else (written[0].parent / link).is_file()

    def test_has_captions_scopes_and_titles_for_those_who_hear_it(self, html: Page) -> None:
        tables = len(list(html.all("table")))
        assert tables == len(list(html.all("caption"))) > 2
        assert all(a.get("scope") in ("col", "row", "colgroup") for a in html.all("th"))
        assert all(a.get("role") == "img" and a.get("aria-labelledby") for a in html.all("svg"))
        assert next(html.all("html"))["lang"] == "en"
        assert all(
            a.get("aria-label") and a.get("tabindex") == "0" for a in html.all("div") if a.get("class") == "scroll"
        )

    def test_shows_nasty_text_as_text(self, html: Page) -> None:
        assert "script" not in {tag for tag, _ in html.tags}
        assert html.text.count(NASTY) == 2, "a reason and the evidence of a finding"

    def test_holds_ours_and_the_papers_numbers(self, html: Page) -> None:
        words = " ".join(html.text.split())
        assert "17.98 paper: 17.98" in words
        assert "768² " in words and "192²" in words

    def test_says_which_claims_hold_and_on_what_evidence(self, html: Page) -> None:
        words = " ".join(html.text.split())
        assert words.count("✓ holds More slots lower perplexity") == 2, "in the summary and below the table"
        assert "? undecided BatchNorm raises usage One seed." in words

    def test_says_which_cells_failed_or_did_not_run(self, html: Page) -> None:
        words = " ".join(html.text.split())
        assert "12 of 13 cells" in words and "0 of 14 cells" in words
        assert "not run: every cell" in words

    def test_says_how_many_runs_there_are_where_some_seeds_of_a_cell_lack(self, tmp_path: Path) -> None:
        table2 = grid("table2", tmp_path / "runs", "cpu")
        write_all(table2)
        pages = write_report([read_results(table2, [1, 2, 3])], tmp_path / "report")
        assert "0 of 13 cells, 13 of 39 runs" in " ".join(parsed(pages[0]).text.split())

    def test_says_what_the_scale_replaced_and_what_all_cells_share(self, html: Page) -> None:
        words = " ".join(html.text.split())
        assert re.search(r"memory\.sub_keys.*128 → 32.*1024 → 256", words)
        assert re.search(r"model\.dim 512 → 32, 1024 → 32, 1600 → 48", words)
        assert "memory.heads 4" in words
        assert "checkpoint.every_steps" not in words

    def test_says_machine_and_how_speed_was_measured(self, html: Page) -> None:
        words = " ".join(html.text.split())
        assert "A machine, Python 3, torch 2 (12 runs)" in words
        assert "its manifest is not here" in words
        assert re.search(r"Report made with pkm \d", words)


def test_a_corpus_is_told_by_its_manifest(tmp_path: Path) -> None:
    results(tmp_path)
    assert page.corpus(tmp_path / "corpus") == (str(tmp_path / "corpus"), [("train", 7, 1234567, 2345678)])


def test_the_papers_own_scale_replaces_nothing(tmp_path: Path) -> None:
    same, replaced = page.settings([read_results(grid("table3", tmp_path), [1])])
    assert [one for one in replaced if one.key != "corpus.path"] == []
    assert ("optim.steps", ("128000",)) in [(one.key, one.values) for one in same]


def test_curves_of_the_same_runs_are_shown_once(tmp_path: Path) -> None:
    table4, figure = (grid(name, tmp_path) for name in ("table4", "speed_memory"))
    write_run(cell(table4, "product-512x512"))
    first = page.section(read_results(table4, [1]))
    second = page.section(read_results(figure, [1]), [first])
    assert "table4-training" in [plot.name for plot in first.plots]
    assert [plot.name for plot in second.plots] == ["speed_memory-kwords_per_s"]
    assert any(first.title in words for words in second.undrawn)
