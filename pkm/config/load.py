"""A YAML file as a frozen, typed config: base files, dotted overrides, and every mistake at once with its line.

Works for any pydantic model. A file may name a `base:` (relative to itself) to start from; later keys win, lists are
replaced, `section: null` removes a section.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel

from pkm.config.renamed import at, with_new_names
from pkm.config.schema_node import NULLS, SchemaNode, nearest
from pkm.config.validate import Checked, check_tree
from pkm.config.yaml_tree import Node, Place, Scalar, merge, parse
from pkm.errors import UserError, UserErrors

Model = TypeVar("Model", bound=BaseModel)
Impossible = Callable[[Model], list[tuple[str, str, str]]]


@dataclass(frozen=True)
class Resolved(Generic[Model]):
    config: Model
    yaml: str
    """The config complete with defaults: loads again to an equal config, without base or overrides."""
    places: dict[str, str]
    """From a dotted key to where it was given."""
    path: str

    def where(self, key: str) -> str:
        """`file:line` or `argument 'a.b=c'` of a key, of the section it would stand in, or else the file."""
        return _where(self.places, key, self.path)

    def refuse(self, impossible: list[tuple[str, str, str]]) -> None:
        """UserErrors for what turns out impossible only later: (dotted key to blame, what is wrong, how to fix it) each."""
        if impossible:
            raise _all(Path(self.path), _blame(impossible, self.places, self.path), [])


@cache  # a file may be read many times over: for each cell of a table, for each rank's checks
def _warn(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {line}", file=sys.stderr)


def load(
    path: Path | str,
    overrides: Sequence[str],
    schema: type[Model],
    check: Impossible[Model] | None = None,
    say: Callable[[str], None] = _warn,
) -> Resolved[Model]:
    """Read `path`, its base files and the overrides (`a.b=value`, later ones win) into a `schema`.

    check  combinations that cannot be: (dotted key to blame, what is wrong, how to fix it). It is called with an
           incomplete config when some settings are wrong themselves: reading one of those raises AttributeError.
    say    is told, in one line each, of the settings that go by another name now

    Raises UserErrors with every mistake of every file and argument.
    """
    reading = _Reading(SchemaNode.by(schema), say)
    tree = reading.file(Path(path), None, ())
    for argument in overrides:
        override = reading.override(argument)
        if override is not None:
            tree = override if tree is None else merge(tree, reading.in_lists(tree, override))
    tree = tree or Node({}, Place(str(path), 1))
    checked = check_tree(tree, schema, str(path), complete=reading.complete)
    places = dict(_places(tree, ""))
    errors = reading.errors + checked.errors
    if reading.complete and check is not None:
        errors += _combinations(checked, check, places, str(path), bool(errors))
    if errors or checked.config is None:
        raise _all(Path(path), errors, reading.sources)
    config: Model = checked.config
    return Resolved(config, dump(config), places, str(path))


def dump(config: BaseModel) -> str:
    """A config as YAML text, with every default written out."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config's tree as one level: from dotted keys to values; a section that is null is a key too, and sections of a list are
    numbered from 0, as arguments have it."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def json_schema(schema: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a file for editors: with `base`, and nothing required, since a base file may give it."""
    whole = schema.model_json_schema()
    for part in (whole, *whole.get("$defs", {}).values()):
        part.pop("required", None)
    base = {"type": "string", "description": "A YAML file, relative to this one, to start from; keys given here win."}
    whole["properties"] = {"base": base, **whole["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole}


class _Dumper(yaml.SafeDumper):
    """Sections as blocks, lists of plain values on one line."""


def _represent_list(dumper: _Dumper, items: list[Any]) -> yaml.Node:
    flow = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flow)


_Dumper.add_representer(list, _represent_list)


class _Reading:
    """The files and arguments of one load, and the mistakes in them."""

    def __init__(self, allowed: SchemaNode, say: Callable[[str], None]):
        self.allowed, self.keys, self.say = allowed, set(allowed.keys()), say
        self.errors: list[tuple[Place, UserError]] = []
        self.sources: list[str] = []
        self.complete = True
        """False once a file or argument could not be read: then what is missing may stand there."""

    def report(self, place: Place, error: UserError) -> None:
        self.errors.append((place, error))

    def file(self, path: Path, named_at: Place | None, chain: tuple[Path, ...]) -> Node | None:
        """The tree of a file over that of its base; None if there is none to go on with."""
        self.sources.append(str(path))
        place = named_at or Place(str(path), 0)
        try:
            if path.resolve() in chain:
                shown = " -> ".join(p.name for p in (*chain, path))
                raise UserError(f"base files go round in a circle: {shown}", str(place), "remove one `base:`")
            text = _read_text(path, str(place), "base: " if named_at else "")
        except UserError as error:
            self.report(place, error)
            self.complete = False
            return None
        before = len(self.errors)
        tree = parse(text, lambda line: Place(str(path), line + 1), self.report)
        if tree is None or not isinstance(tree.value, dict):
            if len(self.errors) == before:
                self.report(Place(str(path), 1), _no_mapping(tree, str(path)))
            self.complete = False
            return None
        tree = with_new_names(tree, self.keys, self.say, self.report)
        return self._over_base(tree, path, (*chain, path.resolve()))

    def _over_base(self, tree: Node, path: Path, chain: tuple[Path, ...]) -> Node:
        assert isinstance(tree.value, dict)
        base = tree.value.get("base")
        own = Node({key: child for key, child in tree.value.items() if key != "base"}, tree.place)
        if base is None or (isinstance(base.value, Scalar) and base.value.plain and base.value.text in NULLS):
            return own
        if not isinstance(base.value, Scalar) or base.value.text == "":
            error = UserError("base must be the path of one YAML file", str(base.place), "write `base: other.yaml`")
            self.report(base.place, error)
            self.complete = False
            return own
        below = self.file(path.parent / base.value.text, base.place, chain)
        return own if below is None else merge(below, own)

    def override(self, argument: str) -> Node | None:
        """`a.b=value` as a tree with the one key."""
        place = Place(f"argument {argument!r}", 0)
        self.sources.append(place.source)
        key, equals, text = argument.partition("=")
        parts = key.strip().split(".")
        problem = self._override_problem(argument, key, equals, text, parts)
        node = None
        if problem is None:
            before = len(self.errors)
            node = parse(text, lambda line: place, self.report)
            if node is None and len(self.errors) == before:
                problem = ("no value after the `=`", f"write {key}=null for none")
        if problem is not None:
            self.report(place, UserError(problem[0], str(place), problem[1]))
        if node is None:
            self.complete = False
            return None
        return with_new_names(at(parts, node, place), self.keys, self.say, self.report)

    def in_lists(self, old: Node | None, new: Node, allowed: SchemaNode | None = None, key: str = "") -> Node:
        """An argument's tree, with `sources.0.path=x` as the list that is there with the one item changed.

        Where a section or a list of sections may stand, and a list does, `memory.knn=8` changes every one of them.
        """
        if not isinstance(new.value, dict) or not new.value:
            return new
        allowed = allowed or self.allowed
        (name, child), *more = new.value.items()
        is_list = old is not None and isinstance(old.value, list)
        if name.isdecimal() and not more and "array" in allowed.kinds and (is_list or "object" not in allowed.kinds):
            return self._in_list(old, int(name), child, allowed, key)
        if is_list and {"array", "object"} <= allowed.kinds:
            items = enumerate(old.value)  # type: ignore[union-attr]
            return Node(
                [merge(item, self.in_lists(item, new, allowed.item(i), f"{key}.{i}")) for i, item in items], new.place
            )
        section = allowed.section({}) or {}
        before = old.value if old is not None and isinstance(old.value, dict) else {}
        inner = {}
        for name, child in new.value.items():
            here = section.get(name, allowed.value(name))
            inner[name] = self.in_lists(before.get(name), child, here, f"{key}.{name}".lstrip("."))
        return Node(inner, new.place)

    def _in_list(self, old: Node | None, index: int, new: Node, allowed: SchemaNode, key: str) -> Node:
        items = list(old.value) if old is not None and isinstance(old.value, list) else []
        if index >= len(items):
            there = f"{key} has {len(items)} items, counted from 0" if items else f"{key} is given no list"
            error = UserError(f"there is no {key}.{index}: {there}", str(new.place), f"write {key}=[...]")
            self.report(new.place, error)
            return old or Node([], new.place)
        items[index] = merge(items[index], self.in_lists(items[index], new, allowed.item(index), f"{key}.{index}"))
        return Node(items, new.place)

    def _override_problem(
        self, argument: str, key: str, equals: str, text: str, parts: list[str]
    ) -> tuple[str, str] | None:
        if not equals:
            return f"{argument!r} is no setting", "write key=value, for example optim.dense.lr=3e-4"
        if key.startswith("-"):
            return "settings have no dashes before them", f"write {key.lstrip('-')}={text}"
        if not all(re.fullmatch(r"[^\s=]+", part) for part in parts):
            return f"{key!r} is no dotted key", "write for example optim.dense.lr=3e-4"
        if parts == ["base"]:
            return "base is named in the file, not on the command line", "load another file, or set its keys"
        return None


def _read_text(path: Path, where: str, what: str) -> str:
    """The text of a YAML file. Raises UserError that says why there is none."""
    if path.is_dir():
        inside = sorted(p.name for p in path.glob("*.yaml"))
        fix = f"name one of its files: {', '.join(inside[:8])}" if inside else "name a YAML file"
        raise UserError(f"{what}{path} is a directory", where, fix)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{what}no such file: {path}", where, _nearest_files(path)) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        found = f"the byte 0x{error.object[error.start]:02x}"
        raise UserError(f"not UTF-8: {found}", f"{path}:{line}", "save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{what}{path} cannot be read: {error.strerror}", where, "make it a readable file") from None


def _nearest_files(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"check the path: there is no directory {folder}"
    names = [p.name for p in folder.glob("*.y*ml")]
    guess = nearest(path.name, names) or nearest(path.name + ".yaml", names)
    if guess:
        return f"did you mean {guess}?"
    return f"{folder} holds {', '.join(sorted(names)[:8])}" if names else f"{folder} holds no YAML file"


def _no_mapping(tree: Node | None, path: str) -> UserError:
    if tree is None or tree.value == Scalar("", True):
        return UserError("the file has no settings", path, "write `key: value` lines; configs/base.yaml shows them all")
    found = "a list" if isinstance(tree.value, list) else "plain text"
    fix = "write `key: value` lines, with a space after the colon"
    return UserError(f"the file is {found}, not a section of keys", str(tree.place), fix)


def _combinations(
    checked: Checked, check: Impossible[Any], places: dict[str, str], path: str, flawed: bool
) -> list[tuple[Place, UserError]]:
    config = checked.config if checked.config is not None else checked.partial
    if config is None:
        return []
    try:
        found = check(config)
    except AttributeError:
        if not flawed:
            raise
        return []
    return _blame(found, places, path)


def _blame(impossible: list[tuple[str, str, str]], places: dict[str, str], path: str) -> list[tuple[Place, UserError]]:
    errors = []
    for key, what, fix in impossible:
        place = _where(places, key, path)
        source, _, line = place.rpartition(":")
        at = Place(source, int(line)) if line.isdigit() else Place(place, 0)
        errors.append((at, UserError(f"{key}: {what}", place, fix)))
    return errors


def _places(node: Node, prefix: str) -> list[tuple[str, str]]:
    if isinstance(node.value, dict):
        children = [(f"{prefix}.{key}" if prefix else key, child) for key, child in node.value.items()]
    elif isinstance(node.value, list):
        children = [(f"{prefix}[{index}]", child) for index, child in enumerate(node.value)]
    else:
        children = []
    own = [(prefix, str(node.place))] if prefix else []
    return own + [entry for key, child in children for entry in _places(child, key)]


def _where(places: dict[str, str], key: str, path: str) -> str:
    while key:
        if key in places:
            return places[key]
        key = re.sub(r"(\.|^|\[)[^.\[]*$", "", key)
    return path


def _all(path: Path, errors: list[tuple[Place, UserError]], sources: list[str]) -> UserErrors:
    order = {source: rank for rank, source in enumerate(sources)}
    errors.sort(key=lambda entry: (order.get(entry[0].source, len(order)), entry[0].line))
    number = f"{len(errors)} mistake{'s' * (len(errors) > 1)}"
    return UserErrors(f"{number} in the settings of {path}", [error for _, error in errors])
