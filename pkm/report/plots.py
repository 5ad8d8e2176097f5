"""Plots of a grid: what the paper's figures show, ours beside the paper's, and how its runs learned.

A plot is drawn in the colours of a light page; its SVG carries those of a dark one, which a browser takes by itself.
"""

from __future__ import annotations

import importlib.util
import io
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pkm.config.schema import Config
from pkm.experiments.grid import Coordinate, Measure, coordinate
from pkm.report.layout import MEASURES, axis_name, phrases, place, written
from pkm.report.results import CellResult, GridResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# (on a light page, on a dark one)
GROUND, INK, SOFT, RULE = ("#fdfdfb", "#15181c"), ("#1f2328", "#e4e6e9"), ("#5b626b", "#a2a9b2"), ("#d9dad4", "#363c44")
# Told apart with any colour vision (after Okabe and Ito); no two lines differ by colour alone all the same.
COLOURS = (
    ("#0072b2", "#5ab4e8"), ("#c8500a", "#f0915a"), ("#00795a", "#3fc79a"),
    ("#a0508c", "#dd9ac6"), ("#8a6d00", "#dcbf3c"), ("#444b54", "#c4cad1"),
)  # fmt: skip
# For what has an order, from few to many: viridis, without the end that the page would swallow.
ORDERED = (
    ("#26ad81", "#2a788e"), ("#1e9d89", "#24878e"), ("#228c8d", "#1f978b"), ("#297b8e", "#21a685"), ("#2f6b8e", "#32b67a"),
    ("#38598c", "#4ec36b"), ("#404588", "#73d056"), ("#46307e", "#9bd93c"), ("#481a6c", "#c8e020"), ("#440154", "#f1e51d"),
)  # fmt: skip
MARKERS, DASHES = "os^Dv<>Phx", ("-", "--", ":", "-.")
OF_A_MEMORY = ("slots", "position", "heads", "knn")
HERE = Path(__file__).parent
FONTS = "system-ui, 'DejaVu Sans', Verdana, sans-serif"


@dataclass(frozen=True)
class Plot:
    """One figure, as SVG and as PNG."""

    name: str
    """Its file's, without ending."""
    caption: str
    """What it shows, also for those who cannot see it."""
    svg: str
    png: bytes

    @property
    def inline(self) -> str:
        """The SVG as an element of a page that has `dark()` among its styles."""
        return re.sub(r"<style>.*?</style>", "", self.svg, count=1, flags=re.DOTALL)


@dataclass(frozen=True)
class Curve:
    """Validation perplexity of one cell over its steps."""

    label: str
    runs: Sequence[Sequence[dict[str, Any]]]
    """For each seed the records of its metrics.jsonl."""
    colour: tuple[str, str]
    marker: str = "o"
    dash: str = "-"

    def points(self) -> list[tuple[int, float, float]]:
        """(step, mean over seeds, standard deviation over seeds or 0)."""
        found: dict[int, list[float]] = {}
        for records in self.runs:
            for record in records:
                if record.get("kind") == "valid" and record.get("perplexity") is not None:
                    found.setdefault(record["step"], []).append(record["perplexity"])
        return [
            (at, statistics.fmean(v), statistics.stdev(v) if len(v) > 1 else 0.0) for at, v in sorted(found.items())
        ]


@dataclass(frozen=True)
class Point:
    """A cell on a plot."""

    one: CellResult
    x: float
    y: float
    spread: float


def plots(result: GridResult, training: bool = True) -> tuple[list[Plot], list[str]]:
    """Those with something to show; and in words those without. `training`: also how the runs learned."""
    if importlib.util.find_spec("matplotlib") is None:
        return [], ["Plots are not drawn, since matplotlib is not installed: pip install 'pkm[report]'."]
    settings = result.grid.settings
    if set(settings.measures) == {"perplexity", "kwords_per_s"}:
        tries: list[Plot | str] = [against_speed(result)]
    else:
        tries = [against_axis(result, measure) for measure in settings.measures]
    if training:
        title = f"Validation perplexity over the steps of training ({settings.title})"
        tries.append(training_curves(f"{result.grid.name}-training", title, list(curves(result))))
    return [one for one in tries if isinstance(one, Plot)], [one for one in tries if isinstance(one, str)]


def against_axis(result: GridResult, measure: Measure) -> Plot | str:
    """A measure against what the grid varies, with a line for each combination of its other coordinates."""
    settings, name = result.grid.settings, MEASURES[measure]
    axis: Coordinate = "knn" if "knn" in settings.columns else settings.rows[-1]
    others = tuple(key for key in (*settings.rows, *settings.columns) if key != axis)
    title = f"{name[0].upper()}{name[1:]} against {axis_name(axis)}"
    if len({place(one.cell, (axis,)) for one in result.cells}) < 2:
        return f"{title} has no plot: the grid has a single cell."
    panels = {"ours": points(result, axis, measure, False), "the paper’s": points(result, axis, measure, True)}
    if not panels["ours"]:
        return f"{title} has no plot yet: no cell has been measured."
    shown = {source: found for source, found in panels.items() if found}
    with canvas() as figure:
        for axes, (source, found) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
            draw_lines(axes, found, axis, others, result)
            draw_axis(axes, axis, [one.cell.config if source == "ours" else one.cell.original for one in result.cells])
            axes.set(title=source, xlabel=axis_name(axis), ylabel=name)
            if measure == "usage":
                axes.set_ylim(0, 105)
            elif measure in ("kl", "kwords_per_s"):
                axes.set_ylim(bottom=0)
        add_legend(figure)
        sides = "ours left, the paper’s right." if len(shown) > 1 else "ours; the paper prints no such numbers."
        return finished(figure, f"{result.grid.name}-{measure}", f"{title}: {sides}{remarks(result, measure)}")


def points(result: GridResult, axis: Coordinate, measure: Measure, printed: bool) -> list[Point]:
    """Of every cell with a number: ours, or the paper's where it stood."""
    found = []
    for one in result.cells:
        y = getattr(one.cell.printed, measure, None) if printed else one.mean(measure)
        x = coordinate(one.cell.original if printed else one.cell.config, axis)
        if y is not None:
            spread = None if printed else one.spread(measure)
            found.append(Point(one, _number(x), y, spread or 0.0))
    return found


def _number(value: int | str | bool | None) -> float:
    """A coordinate's place on an axis: a rate given as a ratio by that; 0 for what is no number."""
    try:
        return float(str(value).removesuffix("x"))
    except ValueError:
        return 0.0


def draw_lines(
    axes: Axes, found: Sequence[Point], axis: Coordinate, others: Sequence[Coordinate], result: GridResult
) -> None:
    """A model without a memory has no place on an axis of the memory: it is a level across all of it."""
    styles = line_styles(result, others)
    lines: dict[tuple[Any, ...], list[Point]] = {}
    for point in found:
        if axis in OF_A_MEMORY and not point.one.cell.original.memory_layers:
            axes.axhline(point.y, color=SOFT[0], linestyle=(0, (1, 2)), label="no memory")
        else:
            lines.setdefault(place(point.one.cell, others), []).append(point)
    for at, line in lines.items():
        line.sort(key=lambda point: point.x)
        text = phrases(line[0].one.cell, others) or result.grid.settings.title
        draw(axes, [p.x for p in line], [p.y for p in line], [p.spread for p in line], text, **styles[at])


def draw(axes: Axes, xs: list[float], ys: list[float], spreads: list[float], text: str, **style: Any) -> None:
    axes.errorbar(xs, ys, spreads if any(spreads) else None, label=text, **style)


def draw_axis(axes: Axes, axis: Coordinate, configs: Sequence[Config]) -> None:
    """Ticks at the sizes there are, measured or not, and only there."""
    places = {coordinate(config, axis) for config in configs if config.memory_layers or axis not in OF_A_MEMORY}
    ticks = {_number(value): written(axis, value) for value in places if value is not None}
    if axis in ("slots", "knn", "heads", "dim") or ("." in axis and ticks and min(ticks) > 0):
        axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [ticks[at] for at in sorted(ticks)])
    axes.minorticks_off()


def line_styles(result: GridResult, keys: Sequence[Coordinate]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """For each combination of coordinates: colour and marker by the first of them, dashes by the last."""
    places = list(dict.fromkeys(place(one.cell, keys) for one in result.cells))
    ranks = [list(dict.fromkeys(column)) for column in zip(*places, strict=True)]
    styles = {}
    for at in places:
        first, last = (ranks[i].index(at[i]) if ranks else 0 for i in (0, -1))
        look = {"color": COLOURS[first % len(COLOURS)][0], "marker": MARKERS[first % len(MARKERS)]}
        styles[at] = look | {"linestyle": DASHES[last % len(DASHES)]}
    return styles


def against_speed(result: GridResult) -> Plot | str:
    """Perplexity against words a second, each cell labelled as in the paper by its layers and memories: 12+1."""
    lines: dict[tuple[Any, ...], list[CellResult]] = {}
    for one in result.cells:
        if one.values("perplexity") and one.values("kwords_per_s"):
            lines.setdefault(place(one.cell, ("dim", "layers")), []).append(one)
    if not lines:
        return "Perplexity against words a second has no plot yet: no cell has both."
    styles = line_styles(result, ("dim",))
    with canvas(height=3.6) as figure:
        axes = figure.subplots()
        for at, line in lines.items():
            xs, ys = ([one.mean(m) or 0.0 for one in line] for m in ("kwords_per_s", "perplexity"))
            wide, tall = ([one.spread(m) or 0.0 for one in line] for m in ("kwords_per_s", "perplexity"))
            text, style = phrases(line[0].cell, ("dim",)), styles[at[:1]]
            draw(axes, xs, ys, tall, text, xerr=wide if any(wide) else None, **style)
            for x, y, one in zip(xs, ys, line, strict=True):
                text = "+".join(str(n) for n in (one.cell.config.model.layers, len(one.cell.config.memory_layers)) if n)
                side = 1 if style["color"] == COLOURS[0][0] else -1
                left = "left" if side > 0 else "right"
                axes.annotate(text, (x, y), (6 * side, 4), textcoords="offset points", ha=left, fontsize=8)
        axes.set(xlabel=MEASURES["kwords_per_s"], ylabel=MEASURES["perplexity"])
        axes.margins(0.1)
        add_legend(figure)
        caption = (
            "Test perplexity against thousands of words a second at inference; lower and further right is better. "
            "Beside each cell its layers and, after a plus, its memories; a line joins the cells of as many layers. "
            "The paper’s figure prints no such speeds as numbers."
        )
        return finished(figure, f"{result.grid.name}-perplexity", caption + remarks(result, "perplexity"))


def curves(result: GridResult) -> Iterator[Curve]:
    """Of every trained cell: colour and marker tell the rows apart, dashes the columns; without a memory, in ink."""
    rows, columns = result.grid.settings.rows, result.grid.settings.columns
    all_rows, groups = (list(dict.fromkeys(place(one.cell, keys) for one in result.cells)) for keys in (rows, columns))
    for one in result.cells:
        if one.cell.trained:
            row, group = all_rows.index(place(one.cell, rows)), groups.index(place(one.cell, columns))
            step = round(row * (len(ORDERED) - 1) / max(len(all_rows) - 1, 1))
            colour = ORDERED[step] if one.cell.original.memory_layers else INK
            runs = [run.metrics for run in one.runs]
            text = phrases(one.cell, (*rows, *columns), short=True)
            yield Curve(text, runs, colour, MARKERS[row % len(MARKERS)], DASHES[group % len(DASHES)])


def training_curves(name: str, title: str, lines: Sequence[Curve]) -> Plot | str:
    """Validation perplexity over steps, a line each; in words why there is no plot, if no run has been validated."""
    drawn = [(line, found) for line in lines if (found := line.points())]
    if not drawn:
        return f"{title} has no plot yet: no run has been validated."
    half = max(found[-1][0] for _, found in drawn) / 2
    with canvas(height=3.4) as figure:
        whole, late = figure.subplots(1, 2)
        for line, found in drawn:
            style = {"color": line.colour[0], "marker": line.marker, "linestyle": line.dash}
            for axes, shown in ((whole, found), (late, [point for point in found if point[0] > half])):
                steps, means, spreads = ([point[i] for point in shown] for i in range(3))
                draw(axes, steps, means, spreads, line.label, markersize=3.5, linewidth=1.1, **style)
        whole.set(title="all of training", xlabel="step", ylabel="validation perplexity", yscale="log")
        late.set(title="its second half", xlabel="step")
        ticks_in_plain_numbers(whole)
        late.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        late.locator_params(axis="x", nbins=5, integer=True)
        add_legend(figure)
        seeds = max(len(line.runs) for line in lines)
        bars = f" Means over {seeds} seeds, with standard deviations." if seeds > 1 else ""
        caption = f"{title}: all of it on a logarithmic axis, and its second half on a linear one.{bars}"
        return finished(figure, name, caption)


def ticks_in_plain_numbers(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    low, high = axes.get_ylim()
    subs = (1.0,) if high > 1000 * low else (1.0, 3.0) if high > 20 * low else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def remarks(result: GridResult, measure: Measure) -> str:
    """What the reader of a plot has to know besides."""
    text = ""
    if any(one.spread(measure) is not None for one in result.cells):
        text += f" Bars: standard deviation over {len(result.seeds)} seeds."
    timed = measure == "kwords_per_s"
    asked = [one for one in result.cells if one.cell.trained or timed]
    if measure in ("usage", "kl"):
        asked = [one for one in asked if one.cell.config.memory]
    lacking = sum(not one.values(measure) for one in asked)
    return text + (f" {lacking} of {len(result.cells)} cells have no number yet." if lacking else "")


@contextmanager
def canvas(height: float = 2.9) -> Iterator[Figure]:
    """A figure in this report's style; draw and finish it within. Inches."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(fname=HERE / "plots.mplstyle"):
        yield Figure(figsize=(7.2, height), layout=ConstrainedLayoutEngine(wspace=0.06))


def add_legend(figure: Figure) -> None:
    """One for all panels, outside them."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, text in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(text, handle[0] if isinstance(handle, tuple) else handle)
    handles, texts = list(entries.values()), list(entries)
    if len(texts) > 1:
        columns = max(1, min(len(texts), 110 // (max(map(len, texts)) + 8)))
        figure.set_figheight(figure.get_figheight() + 0.17 * (math.ceil(len(texts) / columns) - 1))
        figure.legend(handles, texts, loc="outside lower center", ncols=columns)


def finished(figure: Figure, name: str, caption: str) -> Plot:
    """Both files of a figure. Its SVG names no other address, and its ids are its own, so that many fit one page."""
    import matplotlib

    text, picture = io.StringIO(), io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    figure.savefig(picture, format="png", dpi=160, metadata={"Software": None})
    return Plot(name, caption, compact(text.getvalue(), name, caption), picture.getvalue())


def compact(svg: str, name: str, caption: str) -> str:
    """matplotlib's SVG without what a page does not need, with a title and the colours of a dark page."""
    svg = re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", svg)
    svg = re.sub(r"(url\(#|href=\"#)", rf"\g<1>{name}-", svg)
    svg = re.sub(r'="[^"]*"', lambda found: _rounded(found[0]), svg)  # places, not what is to be read
    svg = re.sub(r"\s*\n\s*", "\n", svg.replace(" \n", " ")).strip()
    svg = re.sub(r" font-family: [^;\"]+;| transform=\"rotate\(-0 [^\"]*\"", "", svg)
    svg, again = re.subn(bare := r"<g>\n((?:(?!</?g\b).)*?)</g>\n", r"\1", svg, flags=re.DOTALL)
    while again:
        svg, again = re.subn(bare, r"\1", svg, flags=re.DOTALL)
    title = f'<title id="{name}-title">{escape(caption)}</title><style>{dark()}</style>'
    svg = svg.replace("<svg ", f'<svg class="plot" role="img" font-family="{FONTS}" aria-labelledby="{name}-title" ', 1)
    return svg.replace(">", f">{title}", 1) + "\n"


def _rounded(text: str) -> str:
    return re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), text)


def dark() -> str:
    """CSS that exchanges every colour for that of a dark page. It names no ancestor: a marker, drawn by `use`, has none."""
    rules = [
        f'[style*="{part}: {light}"]{{{part}:{night}!important}}'
        for light, night in (GROUND, INK, SOFT, RULE, *COLOURS, *ORDERED)
        for part in ("fill", "stroke")
    ]
    return f"@media (prefers-color-scheme: dark){{{''.join(rules)}}}"
