"""Settings that had another name, or values that did: files and arguments with the old one still load.

`RENAMED` is all there is to it: an entry for each name that was given up. The runs of earlier versions go on by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pkm.config.yaml_tree import Node, Place, Scalar, merge
from pkm.errors import UserError


class Renamed(NamedTuple):
    old: str
    """Dotted key."""
    new: str
    values: Mapping[str, str] = {}
    """From an old value, as YAML text, to what says the same now; of a key that kept its name only these are old."""


RENAMED = (
    Renamed("optim.dense.fused", "optim.dense.implementation"),
    Renamed("optim.values.update", "optim.values.update", {"fused": "in_backward"}),
    Renamed("optim.max_skipped", "optim.max_consecutive_skips"),
    Renamed("parallel.batch_norm", "parallel.sync_batch_norm", {"all ranks": "true", "each rank": "false"}),
    Renamed("checkpoint.async", "checkpoint.in_background"),
)


def with_new_names(
    tree: Node, keys: set[str], say: Callable[[str], None], report: Callable[[Place, UserError], None]
) -> Node:
    """The tree of one file or argument under today's names.

    keys    all that the schema has: a name that it does not know is left alone
    say     hears of each old name, in one line
    report  is called for a setting that is given under both names
    """
    for renamed in RENAMED:
        old = _find(tree, renamed.old)
        if old is None or renamed.new not in keys:
            continue
        text = old.value.text if isinstance(old.value, Scalar) else ""
        value = renamed.values.get(text)
        if renamed.old == renamed.new and value is None:
            continue
        then, now = (f"{renamed.old}={text}", f"{renamed.new}={value}") if value else (renamed.old, renamed.new)
        if renamed.old != renamed.new and _find(tree, renamed.new) is not None:
            what = f"{renamed.old} is the old name of {renamed.new}, which is given too"
            report(old.place, UserError(what, str(old.place), f"remove {renamed.old}"))
        say(f"{old.place}: {then} is now {now}")
        node = Node(Scalar(value, plain=True), old.place, old.overridden) if value else old
        tree = merge(_without(tree, renamed.old.split(".")), at(renamed.new.split("."), node, tree.place))
    return tree


def with_old_names(settings: dict[str, Any]) -> dict[str, Any]:
    """A config's tree under the names of the first version, for hashes that must stay the same."""
    for renamed in RENAMED:
        *sections, name = renamed.new.split(".")
        here: Any = settings
        for section in sections:
            here = here.get(section) or {}
        if name in here:
            value = here.pop(name)
            was = {now: then for then, now in renamed.values.items()}
            text = str(value).lower() if isinstance(value, bool) else value
            here[renamed.old.rpartition(".")[2]] = was.get(text, value)
    return settings


def _find(tree: Node, key: str) -> Node | None:
    node: Node | None = tree
    for part in key.split("."):
        node = node.value.get(part) if node is not None and isinstance(node.value, dict) else None
    return node


def _without(tree: Node, key: list[str]) -> Node:
    assert isinstance(tree.value, dict)
    first, *rest = key
    if rest:
        value = {**tree.value, first: _without(tree.value[first], rest)}
    else:
        value = {name: child for name, child in tree.value.items() if name != first}
    return Node(value, tree.place, tree.overridden)


def at(key: list[str], node: Node, place: Place) -> Node:
    """A tree that holds `node` alone, at a dotted key."""
    for part in reversed(key):
        node = Node({part: node}, place)
    return node
