"""report.html in a real browser: wide and narrow, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

from pkm.config.load import dump
from pkm.report import single
from pkm.report.page import write_report
from pkm.report.results import read_results
from pkm.report.run_directories import read
from tests.report.made_up import NASTY, grid, write_all, write_run
from tests.support.tiny import tiny_config

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-extensions",
    "--disable-component-update",
    "--disable-background-networking",
    "--disable-sync",
    "--no-first-run",
    "--enable-logging=stderr",
    "--dump-dom",
]
WIDTHS = (1400, 400)
# The page twice, in frames of two widths, since a window cannot be as narrow as a telephone; what they say of themselves.
MEASURE = """
<!doctype html>%s<pre></pre><script>
function number(colour) { return colour.match(/\\d+/g).slice(0, 3).map(Number) }
function of(frame) {
  const page = frame.contentDocument, style = (what) => frame.contentWindow.getComputedStyle(page.querySelector(what))
  return {
    width: frame.contentWindow.innerWidth,
    needs: page.documentElement.scrollWidth,
    tables: page.querySelectorAll('main table').length,
    plots: page.querySelectorAll('figure svg').length,
    narrow_plots: [...page.querySelectorAll('figure svg')].filter(svg => svg.clientWidth < 300).length,
    page: number(style('body').backgroundColor), text: number(style('body').color),
    plot_page: number(style('svg path').fill), plot_text: number(style('svg text').fill)
  }
}
addEventListener('load', () => {
  document.querySelector('pre').textContent = JSON.stringify([...document.querySelectorAll('iframe')].map(of))
})
</script>
"""


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report of a wide table with spreads, a failed cell and plots."""
    table4 = grid("table4", tmp_path_factory.mktemp("runs"), "cpu")
    write_all(table4, (1, 2))
    write_run(table4.cells[0], state="failed", reason=NASTY)
    report = write_report([read_results(table4, [1, 2])], tmp_path_factory.mktemp("report"))[0]
    return report.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page_of_a_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run with a memory, curves, recall of facts and samples with a long word."""
    config = tiny_config(name="one", runs=str(tmp_path_factory.mktemp("runs")))
    config.directory.mkdir(parents=True)
    (config.directory / "config.yaml").write_text(dump(config))
    memory = {"percent": 40.0, "usage": 50.0, "kl": 0.2, "gini": 0.1, "output_share": 0.3, "never_read": 5.0}
    records = []
    for step in range(1, 20):
        rates = {"lr": {"dense": 1e-5 * step, "values": 1e-3}, "gradient_norm": {"dense": 0.5 / step}}
        records.append({"kind": "train", "step": step, "loss": 9.0 - step / 9, "memories": {"2": memory}, **rates})
        sample = {"prompt": "Long", "text": "Donaudampfschifffahrtsgesellschaft" * 6}
        loss = {"loss": 8.0 - step / 9, "perplexity": 900.0 - step}
        records.append({"kind": "valid", "step": step, **loss, "memories": {"2": memory}, "sample": sample})
    (config.directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    group = {"facts": 10, "nll": 7.125, "nll_error": 0.5, "nll_per_token": 3.5, "exact": 12.5}
    (config.directory / "facts.json").write_text(json.dumps({"asked": 10, "groups": {"never": group}}))
    return single.html(*read([config.directory]), "step")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("dark", (False, True), ids=("light", "dark"))
def test_the_page_fits_any_width_and_complains_of_nothing(html: str, dark: bool, tmp_path: Path) -> None:
    seen_to_fit(html, dark, tmp_path, (3, 5, 0))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("dark", (False, True), ids=("light", "dark"))
def test_the_page_of_one_run_does_too(page_of_a_run: str, dark: bool, tmp_path: Path) -> None:
    seen_to_fit(page_of_a_run, dark, tmp_path, (4, 8, 0))


def seen_to_fit(html: str, dark: bool, tmp_path: Path, counts: tuple[int, int, int]) -> None:
    """counts: tables, plots, and plots that are too narrow."""
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{escape(html)}"></iframe>' for width in WIDTHS)
    (tmp_path / "frames.html").write_text(MEASURE % frames, encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [
        str(BROWSER),
        *FLAGS,
        scheme,
        f"--user-data-dir={tmp_path / 'profile'}",
        (tmp_path / "frames.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    measured = re.search(r"<pre>(\[.*?\])</pre>", done.stdout)
    assert measured, done.stderr[-2000:]
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    for width, frame in zip(WIDTHS, json.loads(unescape(measured[1])), strict=True):
        assert frame["width"] == width
        assert frame["needs"] <= width, "the page must not scroll sideways; its tables and plots do"
        assert (frame["tables"], frame["plots"], frame["narrow_plots"]) == counts
        assert frame["page"] == frame["plot_page"], "a plot stands on the page's own ground"
        assert frame["text"] == frame["plot_text"]
        assert (sum(frame["page"]) < sum(frame["text"])) is dark
