"""Tables as text: of any runs, and of a grid with the paper's numbers beside ours, as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

from pkm.experiments.grid import coordinate
from pkm.format import markdown_table
from pkm.report.layout import AXES, MEASURES, NONE, Entry, layout, missing, prose
from pkm.report.results import GridResult


def grid_table(result: GridResult) -> str:
    """Markdown: ours, in brackets the paper's, and below the table what it has no room for."""
    table = layout(result)
    columns = [": ".join(filter(None, (str(group), measure))) for group in table.groups for measure in table.measures]
    body = []
    for row in table.rows:
        entries = [e for group in row.groups for e in group or [None] * len(table.measures)]
        body.append([*map(str, row.labels), *("" if e is None else _markdown(e) for e in entries)])
    lines = [*table.legend, *(f"[{i}] {note}" if i else note for i, note in table.notes)]
    text = markdown_table([escaped(head) for head in (*table.axes, *columns)], body)
    return text + "\n" + "\n".join(f"- {escaped(line)}" for line in lines) + "\n"


def _markdown(entry: Entry) -> str:
    ours = f"{entry.ours} ± {entry.spread}" if entry.spread else entry.ours
    ours = f"**{ours}**" if entry.best else ours
    paper = f"**{entry.paper}**" if entry.paper_best else entry.paper
    mark = f" [{entry.note}]" if entry.note else ""
    return f"{ours}{mark}" + ("" if entry.paper == NONE else f" ({paper})")


def escaped(text: str) -> str:
    """Markdown that reads as `text`."""
    return re.sub(r"([\\`*_|<>])", r"\\\1", " ".join(text.split()))


LATEX = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "²": "$^2$",
    "±": r"$\pm$",
    "–": "--",
    "<": "$<$",
    ">": "$>$",
    "×": r"$\times$",
}


def latex(text: str) -> str:
    """`text` with every character escaped that means something to LaTeX."""
    return "".join(LATEX.get(c, c) for c in text)


def latex_table(result: GridResult) -> str:
    """For a document with \\usepackage{booktabs}: ours, then the paper's in brackets, for each measure of each group."""
    table = layout(result)
    heads, measures = len(table.axes), len(table.measures)
    pair = "r@{\\hspace{3pt}}r"
    wide = len(table.groups) * measures > 6
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table*}[t]",
        f"\\caption{{\\textbf{{{latex(result.grid.settings.title)}.}} {latex(prose(result.grid.settings.about))} "
        f"{latex('; '.join(table.legend).capitalize())}.}}",
        f"\\label{{tab:{re.sub('[^a-z0-9]+', '-', result.grid.name.lower())}}}",
        "\\centering",
        "\\scriptsize\\setlength{\\tabcolsep}{3pt}" if wide else "\\small",
        f"\\begin{{tabular}}{{{'l' * heads}{pair * (len(table.groups) * measures)}}}",
        "\\toprule",
    ]
    if any(group.ours for group in table.groups):
        width = 2 * measures
        groups = [f"\\multicolumn{{{width}}}{{c}}{{{latex(str(group))}}}" for group in table.groups]
        lines.append(" & ".join([""] * (heads - 1) + ["", *groups]).strip() + r" \\")
        spans = (heads + 1 + i * width for i in range(len(groups)))
        lines.append("".join(f"\\cmidrule(lr){{{start}-{start + width - 1}}}" for start in spans))
    named = [f"\\multicolumn{{2}}{{c}}{{{latex(m)}}}" for _ in table.groups for m in table.measures]
    lines += [" & ".join([*map(latex, table.axes), *named]) + r" \\", "\\midrule"]
    for row in table.rows:
        entries = [e for group in row.groups for e in group or [None] * measures]
        texts = [" & " if e is None else _latex(e) for e in entries]
        lines.append(" & ".join([*(latex(str(one)) for one in row.labels), *texts]) + r" \\")
    lines += ["\\bottomrule", "\\end{tabular}"]
    for i, note in table.notes:
        mark = f"\\textsuperscript{{{i}}}" if i else ""
        lines.append(f"\\par\\smallskip\\footnotesize {mark}{latex(note)}")
    return "\n".join([*lines, "\\end{table*}"]) + "\n"


def _latex(entry: Entry) -> str:
    ours, paper = latex(entry.ours), latex(entry.paper)
    if entry.spread:
        ours += f" $\\pm$ {latex(entry.spread)}"
    ours = f"\\textbf{{{ours}}}" if entry.best else ours
    paper = f"\\textbf{{{paper}}}" if entry.paper_best else paper
    mark = f"\\textsuperscript{{{entry.note}}}" if entry.note else ""
    return f"{ours}{mark} & " + ("" if entry.paper == NONE else f"({paper})")


def csv_rows(result: GridResult) -> list[dict[str, Any]]:
    """A row for each cell, over its seeds; numbers are not rounded, missing ones are empty."""
    settings, rows = result.grid.settings, []
    axes = dict.fromkeys((*settings.rows, *settings.columns, *AXES))
    for one in result.cells:
        cell = one.cell
        row: dict[str, Any] = {"grid": result.grid.name, "scale": result.grid.scale, "cell": cell.name}
        for key in axes:
            row |= {key: coordinate(cell.config, key), f"paper_{key}": coordinate(cell.original, key)}
        for measure in MEASURES:
            row |= {measure: one.mean(measure), f"{measure}_spread": one.spread(measure)}
            row |= {
                f"{measure}_seeds": len(one.values(measure)),
                f"paper_{measure}": getattr(cell.printed, measure, None),
            }
        row["trained"] = cell.trained
        row["state"] = "; ".join(dict.fromkeys(run.state for run in one.runs))
        row["reason"] = missing(one, settings.measures)
        row["runs"] = " ".join(str(run.config.directory) for run in one.runs)
        rows.append(row)
    return rows


def csv_table(result: GridResult) -> str:
    rows = csv_rows(result)
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
