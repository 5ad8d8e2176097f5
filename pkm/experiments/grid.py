"""A table or figure of the paper as data: one run config for each cell, at the paper's scale or a smaller one.

configs/paper/NAME.yaml says what the cells are and what the paper printed for them; configs/paper/scales/NAME.yaml says
which sizes stand for the paper's. A scale replaces sizes and steps everywhere alike, so that it cannot change what is compared.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pkm.config.load import load as load_file
from pkm.config.part import Part
from pkm.config.renamed import with_old_names
from pkm.config.schema import Config, load
from pkm.config.schema_node import nearest
from pkm.errors import UserError

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "paper"

NAMED = ("name", "layers", "dim", "memories", "slots", "batchnorm", "position", "keys", "heads", "knn")
COORDINATE = rf"^({'|'.join(NAMED)}|\w+(\.\w+)+)$"
COORDINATE_IN_WORDS = f"{', '.join(NAMED)}, or any setting by its dotted key, as optim.dense.lr"
Coordinate = Annotated[str, Field(pattern=COORDINATE, json_schema_extra={"patternErrorMessage": COORDINATE_IN_WORDS})]
Measure = Literal["perplexity", "train_perplexity", "usage", "kl", "kwords_per_s", "recall"]
Sizes = dict[int, int]


class Printed(Part):
    """What the paper prints for a cell; what it does not print is null."""

    perplexity: float | None = None
    """Test perplexity per BPE token."""
    train_perplexity: float | None = None
    """Training perplexity per BPE token."""
    usage: float | None = None
    """Percent of slots read at least once over the test set."""
    kl: float | None = None
    """KL divergence from uniform reads, in nats."""
    kwords_per_s: float | None = None
    """Thousands of words a second at inference."""


class CellSettings(Part):
    """One cell: settings over the grid's `start` config, and what the paper found with them."""

    name: str
    """What messages call it."""
    set: tuple[str, ...] = ()
    """Settings as on train.py's command line: memory.sub_keys=128."""
    paper: Printed | None = None
    """What the paper prints for it."""
    trained: bool = True
    """false: only its speed is measured, as in the paper."""


class GridSettings(Part):
    """A table or figure."""

    title: str
    """Its heading in a report."""
    about: str
    """What it compares, in a sentence or two."""
    sizes_of: str | None = None
    """The scale whose sizes it has already: of that scale only the other settings are taken, and at no other can it be run."""
    start: str
    """The run config, relative to this file, that the cells change."""
    rows: tuple[Coordinate, ...]
    """What tells the rows of its table apart."""
    columns: tuple[Coordinate, ...] = ()
    """What tells its groups of columns apart."""
    measures: tuple[Measure, ...]
    """What it shows of each cell. kwords_per_s is measured once its runs are trained, and recall: the nats that a token of
    answers costs fewer where training held their sentences more than once than where it never did (scripts/evaluate.py --facts)."""
    cells: tuple[CellSettings, ...]
    """In the paper's order."""


class Scale(Part):
    """Sizes that stand for the paper's. A size that a table does not name is refused; an empty table keeps all."""

    about: str
    """What it is for, in a sentence."""
    layers: Sizes = Field({})
    """model.layers; memory.layers move with it, in proportion."""
    dim: Sizes = Field({})
    """model.dim."""
    sub_keys: Sizes = Field({})
    """memory.sub_keys; memory.slots of flat keys are their squares."""
    knn: Sizes = Field({})
    """memory.knn."""
    set: tuple[str, ...] = ()
    """Other settings, for all grids alike; those of a memory are left out of a dense model."""
    set_for: dict[str, tuple[str, ...]] = Field({})
    """More settings for one grid, by its name."""


@dataclass(frozen=True)
class Cell:
    """A cell of a grid at a scale: one run for each seed."""

    name: str
    printed: Printed
    trained: bool
    original: Config
    """As the paper ran it."""
    config: Config
    """At the scale, with the first seed."""
    file: Path
    arguments: tuple[str, ...]
    """`train.py FILE ARGUMENTS` runs it by hand; name and seed not among them."""

    def run(self, seed: int) -> tuple[Config, tuple[str, ...]]:
        """The config and the arguments of its run with a seed."""
        settings = self.config.model_copy(update={"seed": seed})
        name = f"{settings.name.rpartition('/')[0]}/{run_name(settings)}"
        return settings.model_copy(update={"name": name}), (*self.arguments, f"seed={seed}", f"name={name}")


@dataclass(frozen=True)
class Grid:
    name: str
    settings: GridSettings
    scale: str
    scale_settings: Scale
    cells: tuple[Cell, ...]


def names(folder: Path = FOLDER) -> list[str]:
    """The grids there are: the files of `folder` with cells, in the paper's order."""
    order = ("table1", "table2", "table3", "table4")
    found = [path.stem for path in folder.glob("*.yaml") if "\ncells:" in path.read_text(encoding="utf-8")]
    found += [p.stem for p in folder.glob("*.yaml") if "\nbase: table" in p.read_text(encoding="utf-8")]
    return sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))


def scales(folder: Path = FOLDER) -> list[str]:
    return sorted(path.stem for path in (folder / "scales").glob("*.yaml"))


def load_grid(name: str, scale: str, overrides: Sequence[str] = (), folder: Path = FOLDER) -> Grid:
    """The grid `name` at `scale`, each a name or a YAML file of one's own; `overrides` win over both, in every cell;
    those of a memory are left out of a dense model.

    Raises UserErrors for mistakes in the files, UserError for a name that there is not or a size the scale does not know.
    """
    file = _named(folder, name, names(folder), "table or figure")
    size_file = _named(folder / "scales", scale, scales(folder), "scale")
    name, scale = file.stem, size_file.stem
    settings = load_file(file, (), GridSettings).config
    sizes = load_file(size_file, (), Scale).config
    if settings.sizes_of == scale:
        sizes = sizes.model_copy(update={"layers": {}, "dim": {}, "sub_keys": {}, "knn": {}})
    elif settings.sizes_of is not None:
        fix = f"--scale {settings.sizes_of}, or copy the file and write other sizes into it"
        raise UserError(f"it has sizes of scale {settings.sizes_of}, not of {scale}", str(file), fix)
    start = file.parent / settings.start
    if not start.exists() and (folder / settings.start).exists():
        start = folder / settings.start  # a grid elsewhere may start from the paper's models
    cells = []
    for cell in settings.cells:
        original = load(start, cell.set).config.model_copy(update={"name": cell.name})
        arguments = (*cell.set, *_scaled(original, sizes, scale), *_others(original, sizes, name, overrides))
        config = load(start, arguments).config
        config = config.model_copy(update={"name": f"reproduce/{scale}/{cell.name}"})
        printed = cell.paper or Printed()
        cells.append(Cell(cell.name, printed, cell.trained, original, config, start, arguments))
    return Grid(name, settings, scale, sizes, tuple(cells))


def coordinate(config: Config, key: Coordinate) -> int | str | bool | None:
    """Where a config stands on one axis of a grid; None where a dense model has no place on it."""
    if key == "name":  # of the cell
        return config.name.rpartition("/")[2]
    if "." in key:
        return setting(config, key)
    m = config.memories[0] if config.memories else None
    everywhere = {"layers": config.model.layers, "dim": config.model.dim, "memories": len(config.memory_layers)}
    if key in everywhere or m is None:
        return everywhere.get(key, 0 if key == "slots" else None)
    values: dict[str, Any] = {
        "slots": config.slots, "batchnorm": m.query.norm == "batch", "position": config.memory_layers[0], "keys": m.keys,
        "heads": m.heads, "knn": m.knn,
    }  # fmt: skip
    return values[key]


def setting(config: Config, key: str) -> Any:
    """A setting by its dotted key; None where there is none such, as in the memory of a dense model."""
    found: Any = config.model_dump(mode="json")
    for part in key.split("."):
        if isinstance(found, list):  # of sections: the first, where no number says which
            index = int(part) if part.isdecimal() else 0
            found = found[index] if index < len(found) else None
            if part.isdecimal():
                continue
        found = found.get(part) if isinstance(found, dict) else None
    return found


def run_name(config: Config) -> str:
    """A name that tells a run of a grid apart: readable, and the same for the same settings on the same corpus."""
    parts = [f"{config.model.layers}x{config.model.dim}"]
    if not config.memories:
        parts.append("dense")
    for m in config.memories:
        side = f"{m.sub_keys}x{m.sub_keys}" if m.sub_keys else f"{m.keys}{m.slots}"
        layers = "+".join(map(str, config.layers_of(m)))
        parts += [side, f"layer{layers}", f"h{m.heads}k{m.knn}", m.query.norm]
    # Without defaults, so that a setting which a later version adds leaves the name as it is.
    left_out = {"name", "runs", "checkpoint", "log", "max_minutes", "profile", "threads"}
    # Under their first names, so that a setting which was renamed leaves it as well.
    tree = with_old_names(config.model_dump(mode="json", exclude=left_out, exclude_defaults=True))
    tree["corpus"]["path"] = _fingerprint(config.corpus.path)
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:8]
    return "-".join([*parts, f"seed{config.seed}", digest])


def _fingerprint(corpus: Path) -> str:
    """A prepared corpus by its manifest, so that one that moved is still the same; its path, if there is none yet."""
    try:
        return hashlib.sha256((corpus / "manifest.json").read_bytes()).hexdigest()
    except OSError:
        return str(corpus)


def _scaled(original: Config, scale: Scale, name: str) -> list[str]:
    """The sizes of a cell, replaced."""

    def size(key: str, table: Sizes, value: int) -> int:
        if table and value not in table:
            what = f"the scale says nothing of {key} = {value}"
            raise UserError(what, f"scale {name}", f"add `{value}: SIZE` to {key.rpartition('.')[2]} in its file")
        return table.get(value, value)

    model = original.model
    layers = size("model.layers", scale.layers, model.layers)
    sizes: list[tuple[str, Any, Any]] = [("model.layers", model.layers, layers)]
    sizes.append(("model.dim", model.dim, size("model.dim", scale.dim, model.dim)))
    for i, m in enumerate(original.memories):
        section = f"memory.{i}" if isinstance(original.memory, tuple) else "memory"
        sizes.append((f"{section}.knn", m.knn, size("memory.knn", scale.knn, m.knn)))
        if m.sub_keys is not None:
            sizes.append((f"{section}.sub_keys", m.sub_keys, size("memory.sub_keys", scale.sub_keys, m.sub_keys)))
        if m.slots is not None and scale.sub_keys:
            side = size("memory.sub_keys", scale.sub_keys, math.isqrt(m.slots))
            sizes.append((f"{section}.slots", m.slots, side**2))
        if m.layers is not None:
            moved = [max(1, round(layer * layers / model.layers)) for layer in m.layers]
            sizes.append((f"{section}.layers", list(m.layers), moved))
    return [f"{key}={now}".replace(" ", "") for key, before, now in sizes if before != now]


def _others(original: Config, scale: Scale, grid: str, overrides: Sequence[str]) -> list[str]:
    given = (*scale.set, *scale.set_for.get(grid, ()), *overrides)
    return [one for one in given if original.memory is not None or not one.startswith("memory.")]


def _named(folder: Path, name: str, known: Sequence[str], kind: str) -> Path:
    if name in known:
        return folder / f"{name}.yaml"
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    for other in ("recipes", "memories"):
        if (found := folder.parent / other / f"{name}.yaml").exists():
            return found
    guess = nearest(name, list(known))
    fix = f"did you mean {guess}?" if guess else f"there are: {', '.join(known)}"
    raise UserError(f"no {kind} is called {name!r}", fix=f"{fix} (or name a YAML file of your own)")
