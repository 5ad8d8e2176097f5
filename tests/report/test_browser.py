"""report.html in a real browser: wide and narrow, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

from pkm.report.page import write_report
from pkm.report.results import read_results
from tests.report.made_up import NASTY, grid, write_all, write_run

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


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("dark", (False, True), ids=("light", "dark"))
def test_the_page_fits_any_width_and_complains_of_nothing(html: str, dark: bool, tmp_path: Path) -> None:
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
        assert (frame["tables"], frame["plots"], frame["narrow_plots"]) == (3, 5, 0)
        assert frame["page"] == frame["plot_page"], "a plot stands on the page's own ground"
        assert frame["text"] == frame["plot_text"]
        assert (sum(frame["page"]) < sum(frame["text"])) is dark
