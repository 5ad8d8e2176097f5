"""YAML text as a tree that knows the line of every key, read the same way whatever YAML's version would make of it.

Scalars stay text here: `3e-4`, `off`, `010` mean nothing until the schema says what their setting holds (pkm.config.schema_node).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from pkm.errors import UserError


class Place(NamedTuple):
    """Where something is written: a line of a file (from 1), or a command-line argument (line 0)."""

    source: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class Scalar(NamedTuple):
    text: str
    plain: bool
    """Without quotes."""


@dataclass(frozen=True)
class Node:
    value: Scalar | list[Node] | dict[str, Node]
    place: Place
    overridden: tuple[Place, ...] = ()
    """Where earlier files say the same key."""


Report = Callable[[Place, UserError], None]


def parse(text: str, place: Callable[[int], Place], report: Report) -> Node | None:
    """The tree of one YAML document, or None if it is empty or does not parse.

    place   from a line (counted from 0) to where that is
    report  called with every mistake found: syntax, keys given twice, tags, keys that are no words
    """
    try:
        # The reader itself refuses characters that YAML does not allow, so it is made in here too.
        root = _Composer(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = place(mark.line if mark else 0)
        report(at, _syntax_error(error, at))
        return None
    except ReaderError as error:
        at = place(text.count("\n", 0, error.position))
        report(at, UserError(f"the character U+{error.character:04X} cannot stand in YAML", str(at), "remove it"))
        return None
    except RecursionError:
        at = place(0)
        report(at, UserError("sections or lists are nested too deeply", str(at), "remove brackets"))
        return None
    if root is None:
        return None
    try:
        return _Reading(place, report).node(root, place(root.start_mark.line))
    except _TooManyNodes as error:
        what = f"aliases in it unfold to more than {MOST_NODES:,} values"
        report(error.place, UserError(what, str(error.place), "write the values out"))
        return None


def merge(old: Node, new: Node) -> Node:
    """`new` over `old`: sections are joined key by key, everything else is replaced."""
    overridden = (*old.overridden, old.place)
    if not (isinstance(old.value, dict) and isinstance(new.value, dict)):
        return Node(new.value, new.place, overridden)
    joined = dict(old.value)
    for key, child in new.value.items():
        joined[key] = merge(joined[key], child) if key in joined else child
    return Node(joined, new.place, overridden)


class _Composer(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML up to nodes with line numbers, without the resolver that guesses types."""

    def __init__(self, text: str):
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """An alias becomes a copy of what it stands for that knows where the alias is."""
        mark = self.peek_event().start_mark if self.check_event(yaml.AliasEvent) else None
        node = super().compose_node(parent, index)
        if mark is not None:
            node = copy.copy(node)
            node.start_mark, node.alias = mark, True  # type: ignore[union-attr]
        return node


KNOWN_TAGS = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"}
MOST_NODES = 100_000
"""Of a tree: aliases of aliases double it, or more, with every line."""


class _TooManyNodes(Exception):
    def __init__(self, place: Place):
        self.place = place


class _Reading:
    """PyYAML's nodes -> ours. What an alias brings in is placed where the alias stands, not where its anchor does."""

    def __init__(self, place: Callable[[int], Place], report: Report):
        self._place, self._report = place, report
        self.open: list[yaml.Node] = []
        self.nodes = 0
        self.alias: Place | None = None
        """Of the alias that is being read."""

    def place(self, line: int) -> Place:
        return self.alias or self._place(line)

    def report(self, place: Place, error: UserError) -> None:
        if self.alias is None:  # else it was reported at the anchor
            self._report(place, error)

    def node(self, raw: yaml.Node, at: Place) -> Node:
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise _TooManyNodes(at)
        if not isinstance(raw, yaml.ScalarNode) and any(raw.value is outer.value for outer in self.open):
            self._report(at, UserError("an anchor holds itself", str(at), "write the values out"))
            return Node(Scalar("", True), at)
        outer = self.alias
        self.alias = outer or (at if hasattr(raw, "alias") else None)
        try:
            return self._node(raw, at)
        finally:
            self.alias = outer

    def _node(self, raw: yaml.Node, at: Place) -> Node:
        if raw.tag not in KNOWN_TAGS:
            name = raw.tag.replace("tag:yaml.org,2002:", "!!")
            self.report(at, UserError(f"the tag {name} is not used here", str(at), f"remove {name}"))
        self.open.append(raw)
        try:
            return Node(self._value(raw), at)
        finally:
            self.open.pop()

    def _value(self, raw: yaml.Node) -> Scalar | list[Node] | dict[str, Node]:
        if isinstance(raw, yaml.ScalarNode):
            return Scalar(raw.value, plain=not raw.style)
        if isinstance(raw, yaml.SequenceNode):
            return [self.node(item, self.place(item.start_mark.line)) for item in raw.value]
        assert isinstance(raw, yaml.MappingNode)
        return self._mapping(raw)

    def _mapping(self, raw: yaml.MappingNode) -> dict[str, Node]:
        found: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        merges: list[Place] = []
        for key, value in raw.value:
            at = self.place(key.start_mark.line)
            if not isinstance(key, yaml.ScalarNode):
                self.report(at, UserError("a key is not a word", str(at), "write `key: value`"))
            elif key.value == "<<" and not key.style:
                # YAML's merge key: what stands in this mapping wins, then the earlier of the merged ones.
                if merges:
                    self._twice("<<", merges[0], at, "write one, with a list: `<<: [*a, *b]`")
                merges.append(at)
                merged = {**self._merged(value, at), **merged}
            else:
                child = self.node(value, at)
                if key.value in found:
                    first = found[key.value]
                    self._twice(key.value, first.place, at)
                    child = Node(merge(first, child).value, at)
                found[key.value] = child
        return {**merged, **found}

    def _merged(self, value: yaml.Node, at: Place) -> dict[str, Node]:
        parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
        merged: dict[str, Node] = {}
        for part in parts:
            if isinstance(part, yaml.MappingNode):
                inner = self.node(part, at).value
                assert isinstance(inner, dict)
                merged = {**inner, **merged}
            else:
                self.report(at, UserError("`<<` takes a section", str(at), "write `<<: *anchor` of a section"))
        return merged

    def _twice(self, key: str, first: Place, second: Place, fix: str = "remove one of the two") -> None:
        lines = f"on line {first.line} and on line {second.line}" if second.line else "in one value"
        self.report(second, UserError(f"{key} is given twice, {lines}", str(second), fix))


# What PyYAML says -> (what is wrong, how to fix it), for the mistakes that people make.
SYNTAX = (
    ("'\\t'", "a tab stands where YAML wants spaces", "indent with spaces"),
    (
        "mapping values are not allowed",
        "a colon stands where no key can be",
        "put a value that has a colon in quotes; otherwise check the indentation of this line and the one above",
    ),
    ("could not find expected ':'", "a key has no colon", "write `key: value`, with a space after the colon"),
    ("<block end>", "the indentation does not fit the lines above", "align the keys of a section"),
    ("expected a single document", "a second document begins", "keep one document in a file: remove the `---`"),
    ("found undefined alias", "an alias names an anchor that is not there", "define it first: `&name`"),
    ("cannot start any token", "a character that cannot begin a value", "put the value in quotes"),
    ("',' or ']'", "a list is not closed", "close it with `]`"),
    ("',' or '}'", "a section in braces is not closed", "close it with `}`"),
    ("unexpected end of stream", "a quoted text is not closed", "close the quotes"),
)


def _syntax_error(error: yaml.MarkedYAMLError, at: Place) -> UserError:
    problem = " ".join(filter(None, (error.context, error.problem)))
    for sign, what, fix in SYNTAX:
        if sign in problem:
            since = error.context_mark.line + 1 if error.context_mark and at.line else at.line
            begun = f" (begun on line {since})" if since != at.line else ""
            detail = f": {error.problem}" if "alias" in sign or "token" in sign else ""
            return UserError(f"not valid YAML: {what}{begun}{detail}", str(at), fix)
    return UserError(f"not valid YAML: {problem}", str(at), "correct the line, or put the value in quotes")
