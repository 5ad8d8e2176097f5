"""A YAML tree against a pydantic model: the model, or every mistake with its place and what is allowed instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from pkm.config.schema_node import NULLS, Mismatch, SchemaNode, nearest
from pkm.config.yaml_tree import Node, Place, Scalar
from pkm.errors import UserError


@dataclass
class Checked:
    config: Any = None
    """The model, if nothing is wrong with its settings one by one."""
    partial: Any = None
    """Otherwise the model without the settings that are wrong: reading one of those raises AttributeError."""
    errors: list[tuple[Place, UserError]] = field(default_factory=list)


def check_tree(tree: Node, schema: type[BaseModel], path: str, complete: bool = True) -> Checked:
    """complete  False if keys may be missing only because a file could not be read: then none is reported missing."""
    reading = _Reading(SchemaNode.by(schema))
    data = reading.section(tree, reading.root, "")
    checked = Checked(errors=reading.errors)
    bad = reading.bad
    try:
        config = schema.model_validate(data)
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            key = _key(problem["loc"], data)
            # A setting is reported once: not again for what it holds, nor for what holds it.
            if any(_within(key, wrong) or (_within(wrong, key) and problem["type"] != "missing") for wrong in bad):
                continue
            bad.add(key)
            if any(_within(key, guess) for guess in reading.guessed):
                continue
            if complete or problem["type"] != "missing":
                checked.errors.append(_explain(key, problem, tree, reading.root, path))
        checked.partial = _partial(schema, data, bad, "")
    else:
        checked.config = None if bad else config
        checked.partial = _partial(schema, data, bad, "") if bad else config
    return checked


class _Reading:
    """The tree -> plain data of the kinds that the schema wants, and what could not be read."""

    def __init__(self, root: SchemaNode):
        self.root = root
        self.all_keys = list(root.keys())
        self.errors: list[tuple[Place, UserError]] = []
        self.bad: set[str] = set()
        self.guessed: set[str] = set()

    def wrong(self, place: Place, key: str, what: str, fix: str | None) -> None:
        self.bad.add(key)
        self.errors.append((place, UserError(what, str(place), fix)))

    def value(self, node: Node, allowed: SchemaNode, key: str) -> Any:
        if isinstance(node.value, Scalar):
            return self.scalar(node, allowed, key)
        is_section = isinstance(node.value, dict)
        if ("object" if is_section else "array") not in allowed.kinds:
            self.wrong(node.place, key, f"{key} must be {allowed.words}; found {found(node)}", None)
            return None
        return self.section(node, allowed, key) if is_section else self.items(node, allowed, key)

    def items(self, node: Node, allowed: SchemaNode, key: str) -> list[Any]:
        assert isinstance(node.value, list)
        return [self.value(child, allowed.item(i), f"{key}[{i}]") for i, child in enumerate(node.value)]

    def scalar(self, node: Node, allowed: SchemaNode, key: str) -> Any:
        assert isinstance(node.value, Scalar)
        try:
            return allowed.read(node.value)
        except Mismatch as mismatch:
            if "object" in allowed.kinds and found(node) in ("nothing", "null"):
                return {}  # a section with nothing in it, or one taken away: its defaults
            fix = mismatch.fix
            if "object" in allowed.kinds and ":" in node.value.text:
                fix = "put a space after the colon"
            self.wrong(node.place, key, f"{key} must be {allowed.words}; found {found(node)}", fix)
            return None

    def section(self, node: Node, allowed: SchemaNode, key: str) -> dict[str, Any]:
        assert isinstance(node.value, dict)
        texts = {name: child.value.text for name, child in node.value.items() if isinstance(child.value, Scalar)}
        known = allowed.section(texts)
        prefix = f"{key}." if key else ""
        data = {}
        for name, child in node.value.items():
            if known is None:
                data[name] = self.value(child, allowed.value(name), prefix + name)
            elif name in known:
                data[name] = self.value(child, known[name], prefix + name)
        for name, child in node.value.items():
            if known is not None and name not in known:
                self._unknown(name, child, known, prefix, data)
        return {name: value for name, value in data.items() if prefix + name not in self.bad}

    def _unknown(self, name: str, node: Node, known: dict[str, SchemaNode], prefix: str, data: dict[str, Any]) -> None:
        guess = nearest(name, [key for key in known if key not in data]) or nearest(name, list(known))
        elsewhere = [key for key in self.all_keys if key.rsplit(".", 1)[-1] == name]
        for place in (*node.overridden, node.place):
            what = f"{prefix}{name} is no setting"
            self.wrong(place, prefix + name, what, _advice(name, prefix, guess, elsewhere, known))
        if guess and guess not in data and not elsewhere:
            self._go_on_as(node, known[guess], prefix + guess, guess, data)

    def _go_on_as(self, node: Node, allowed: SchemaNode, key: str, name: str, data: dict[str, Any]) -> None:
        """Read a misspelt key as the one it most likely means, so that what depends on that is checked as meant."""
        trial = _Reading(self.root)
        value = trial.value(node, allowed, key)
        if trial.errors:
            self.bad.add(key)
        else:
            data[name] = value
            self.guessed.add(key)


def _advice(name: str, prefix: str, guess: str | None, elsewhere: list[str], known: dict[str, SchemaNode]) -> str:
    if name == "base":
        return "`base:` stands at the top of a file"
    if elsewhere and not (guess and nearest(name, [guess], 0.85)):
        return f"it belongs elsewhere: {', '.join(elsewhere[:4])}"
    if guess:
        return f"did you mean {prefix}{guess}?"
    return f"{prefix.rstrip('.') or 'the top level'} has: {', '.join(known)}"


def found(node: Node) -> str:
    """What stands there, in words."""
    if isinstance(node.value, dict):
        return "a section of keys"
    if isinstance(node.value, list):
        texts = [item.value.text for item in node.value if isinstance(item.value, Scalar)]
        return f"[{', '.join(texts)}]" if len(texts) == len(node.value) <= 8 else "a list"
    text, plain = " ".join(node.value.text.split()), node.value.plain
    if plain and text in NULLS:
        return "nothing" if text == "" else "null"
    shown = text if len(text) <= 60 else text[:57] + "..."
    return shown if plain else f'"{shown}" (text, in quotes)'


def _key(loc: tuple[int | str, ...], data: Any) -> str:
    """pydantic's location as a dotted key: names of union members, which are no keys, are left out."""
    key, here = "", data
    for place, part in enumerate(loc):
        last = place == len(loc) - 1
        if isinstance(here, dict) and (part in here or (last and isinstance(part, str))):
            key, here = (f"{key}.{part}" if key else str(part)), here.get(part)
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            key, here = f"{key}[{part}]", here[part]
    return key


def _within(key: str, outer: str) -> bool:
    return key == outer or key.startswith((f"{outer}.", f"{outer}["))


def _explain(key: str, problem: Any, tree: Node, root: SchemaNode, path: str) -> tuple[Place, UserError]:
    node, allowed, reached = _at(key, tree, root)
    place = node.place if reached else (node.place if node is not tree else Place(path, 0))
    if problem["type"] == "missing" and not reached:
        return place, UserError(f"{key} is missing", str(place), _how_to_add(key, allowed))
    if problem["type"] == "value_error":
        return place, UserError(f"{key}: {problem['ctx']['error']}".removeprefix(": "), str(place))
    words = allowed.words
    if problem["type"] == "finite_number":
        words = words.replace("a number", "a finite number")
    guess = allowed.nearest_choice(node.value.text) if isinstance(node.value, Scalar) else None
    advice = f"did you mean {guess}?" if guess else None
    return place, UserError(f"{key} must be {words}; found {found(node)}", str(place), advice)


def _how_to_add(key: str, allowed: SchemaNode) -> str:
    description = allowed.schema.get("description", "").split("\n")[0]
    needed = [name for choice in allowed.choices for name in choice.get("required", ())]
    holds = f"a section with {', '.join(needed)}" if needed else allowed.words
    return f"add `{key.rsplit('.', 1)[-1]}:` ({holds})" + (f": {description}" if description else "")


def _at(key: str, tree: Node, root: SchemaNode) -> tuple[Node, SchemaNode, bool]:
    """The node at a dotted key, or the last one before it; what is allowed at the key; whether the node is there."""
    node, allowed, reached = tree, root, True
    for part in key.replace("[", ".[").split("."):
        if part.startswith("["):
            index = int(part[1:-1])
            allowed = allowed.item(index)
            child = node.value[index] if isinstance(node.value, list) and index < len(node.value) else None
        else:
            section = allowed.section({})
            allowed = section[part] if section and part in section else allowed.value(part)
            child = node.value.get(part) if isinstance(node.value, dict) else None
        if child is None:
            reached = False
        elif reached:
            node = child
    return node, allowed, reached


def _partial(schema: type[BaseModel], data: dict[str, Any], bad: set[str], prefix: str) -> BaseModel:
    """A model of the settings that are right; the others are not even there, not with their defaults either."""
    fields: dict[str, Any] = {}
    left_out = set()
    for name, info in schema.model_fields.items():
        key = prefix + name
        section = _section(info.annotation)
        if key in bad or (name not in data and info.is_required()):
            left_out.add(name)
        elif name not in data:
            continue
        elif section is not None and isinstance(data[name], dict):
            fields[name] = _partial(section, data[name], bad, f"{key}.")
        elif section is not None and data[name] and isinstance(data[name], list):
            fields[name] = tuple(_partial(section, item, bad, f"{key}[{i}].") for i, item in enumerate(data[name]))
        elif any(_within(wrong, key) for wrong in bad):
            left_out.add(name)
        else:
            kind: Any = Annotated[info.annotation, info]
            fields[name] = TypeAdapter(kind).validate_python(data[name])
    model = schema.model_construct(None, **fields)
    for name in left_out:
        model.__dict__.pop(name, None)
    return model


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model of a section, optional or not, one or a list of them; None for a setting."""
    models = set(_models(annotation))
    return models.pop() if len(models) == 1 else None


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
