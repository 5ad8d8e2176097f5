"""A report of grids: one self-contained page, and each table and plot as files beside it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pkm.config.load import flatten
from pkm.config.schema import Config
from pkm.files import atomic_write
from pkm.machine import code_version
from pkm.report.claims import Finding, findings
from pkm.report.layout import Layout, layout, prose, speeds
from pkm.report.plots import Plot, dark, plots
from pkm.report.results import GridResult
from pkm.report.tables import csv_table, escaped, grid_table, latex_table

HERE = Path(__file__).parent
# Settings that change no result; and the seed, of which a report has several.
NOT_SETTINGS = {"name", "runs", "seed", "log", "checkpoint", "max_minutes", "profile"}

NOT_SET = "not set"


@dataclass(frozen=True)
class Section:
    """One grid of the page."""

    result: GridResult
    table: Layout
    findings: tuple[Finding, ...]
    plots: tuple[Plot, ...]
    undrawn: tuple[str, ...]
    """Why other plots are not drawn, in words."""

    @property
    def name(self) -> str:
        return self.result.grid.name

    @property
    def title(self) -> str:
        return self.result.grid.settings.title

    @property
    def short(self) -> str:
        """For the contents: `Table 2`, or what a figure shows."""
        kind, _, text = self.title.partition(": ")
        return text[:1].upper() + text[1:] if kind == "Figure" else kind

    @property
    def about(self) -> str:
        return prose(self.result.grid.settings.about)

    @property
    def finished(self) -> str:
        """`3 of 14 cells`; and where some of a cell's seeds lack, `17 of 42 runs`."""
        of_cells = [
            [run.state == "finished" or bool(run.speed and not one.cell.trained) for run in one.runs]
            for one in self.result.cells
        ]
        done, runs = sum(map(all, of_cells)), [run for runs in of_cells for run in runs]
        text = f"{done} of {len(of_cells)} cell{'s' * (len(of_cells) != 1)}"
        partly = any(any(runs) and not all(runs) for runs in of_cells)
        return f"{text}, {sum(runs)} of {len(runs)} runs" if partly else text


@dataclass(frozen=True)
class Setting:
    """A setting and what it is, over all cells."""

    key: str
    values: tuple[str, ...]


def write_report(results: Sequence[GridResult], folder: Path) -> list[Path]:
    """Write report.html, and for each grid NAME.md, NAME.tex, NAME.csv and plots/NAME-*.svg and .png, into `folder`.

    Returns what was written, report.html first. UserError where the folder cannot be written.
    """
    sections: list[Section] = []
    for result in results:
        sections.append(section(result, sections))
    page = folder / "report.html"
    written = [page]
    for one in sections:
        files: dict[str, str | bytes] = {f"plots/{plot.name}.svg": plot.svg for plot in one.plots}
        files |= {f"plots/{plot.name}.png": plot.png for plot in one.plots}
        files |= {f"{one.name}.csv": csv_table(one.result), f"{one.name}.tex": latex_table(one.result)}
        files |= {f"{one.name}.md": markdown(one)}
        for name, content in files.items():
            atomic_write(folder / name, content)
            written.append(folder / name)
    atomic_write(page, html(sections))
    return written


def section(result: GridResult, earlier: Sequence[Section] = ()) -> Section:
    """The section of one grid. Training curves that an earlier section shows are not shown again."""
    same = next((one for one in earlier if trained(result) and trained(result) <= trained(one.result)), None)
    drawn, undrawn = plots(result, training=same is None)
    if same:
        undrawn.append(f"The training curves of these runs are under “{same.title}”.")
    return Section(result, layout(result), tuple(findings(result)), tuple(drawn), tuple(undrawn))


def trained(result: GridResult) -> set[Path]:
    """The directories of its runs."""
    return {run.config.directory for one in result.cells if one.cell.trained for run in one.runs}


def markdown(one: Section) -> str:
    """NAME.md: the table, the findings and the plots."""
    text = [f"# {escaped(one.title)}", escaped(one.about), grid_table(one.result).strip()]
    if one.findings:
        text.append("## Findings")
        text.append("\n".join(f"- **{f.verdict}**: {escaped(prose(f'{f.claim}. {f.evidence}'))}" for f in one.findings))
    if one.plots or one.undrawn:
        text.append("## Plots")
    text += [f"![{escaped(plot.caption)}](plots/{plot.name}.svg)\n\n{escaped(plot.caption)}" for plot in one.plots]
    text += [escaped(words) for words in one.undrawn]
    return "\n\n".join(text) + "\n"


def html(sections: Sequence[Section]) -> str:
    """report.html: one file that loads no other."""
    results = [one.result for one in sections]
    same, mapped = settings(results)
    return render(
        "page.html",
        sections=sections,
        scales=list({r.grid.scale: r.grid.scale_settings.about for r in results}.items()),
        seeds=sorted({seed for r in results for seed in r.seeds}),
        same=same,
        mapped=mapped,
        machines=machines(results),
        speeds=list(dict.fromkeys(how for r in results for how in speeds(r))),
        corpora=[corpus(path) for path in dict.fromkeys(c.config.corpus.path for r in results for c in r.grid.cells)],
        versions=code_version(),
    )


def render(template: str, **values: Any) -> str:
    """A page, in one file that loads no other, from a template in this folder."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["prose"] = prose
    css = (HERE / "page.css").read_text(encoding="utf-8") + dark()
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return environment.get_template(template).render(css=css, date=date, **values)


def settings(results: Sequence[GridResult]) -> tuple[list[Setting], list[Setting]]:
    """What all cells share, at this scale; and what the scale replaced, as `paper → ours`, over all cells."""
    ours: dict[str, dict[str, None]] = {}
    replaced: dict[str, dict[str, None]] = {}
    cells = [cell for result in results for cell in result.grid.cells]
    for cell in cells:
        here, there = flat(cell.config), flat(cell.original)
        for key, value in here.items():
            ours.setdefault(key, {})[value] = None
        for key in {**there, **here}:
            before, now = there.get(key, NOT_SET), here.get(key, NOT_SET)
            if before != now:
                replaced.setdefault(key, {})[f"{before} → {now}"] = None
    same = [Setting(key, tuple(values)) for key, values in ours.items() if len(values) == 1 and NOT_SET not in values]
    return same, [Setting(key, tuple(pairs)) for key, pairs in replaced.items()]


def flat(config: Config) -> dict[str, str]:
    """Every setting that says what is run, by its dotted key."""
    tree = flatten(config.model_dump(mode="json", exclude=NOT_SETTINGS))
    return {key: NOT_SET if v is None else v if isinstance(v, str) else json.dumps(v) for key, v in tree.items()}


def machines(results: Sequence[GridResult]) -> list[tuple[str, int]]:
    """(platform and versions, how many runs) as the runs' reports say."""
    counts: dict[str, int] = {}
    reports = {run.config.directory: run.report for r in results for one in r.cells for run in one.runs if run.report}
    for report in reports.values():
        counts[report["machine"]] = counts.get(report["machine"], 0) + 1
    return sorted(counts.items(), key=lambda found: -found[1])


def corpus(path: Path) -> tuple[str, list[tuple[str, int, int, int]]]:
    """A prepared corpus: its path and, where its manifest can be read, (split, documents, words, BPE tokens) of each."""
    try:
        splits = json.loads((path / "manifest.json").read_bytes())["splits"]
        return str(path), [(n, s["documents"], s["words"], s["tokens"]) for n, s in splits.items()]
    except (OSError, ValueError, KeyError, TypeError):
        return str(path), []
