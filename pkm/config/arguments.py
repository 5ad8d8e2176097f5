"""Settings that a program gives as arguments, held to the schema of a file's section: the same mistakes in the same words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from pkm.config.validate import Checked, check_tree
from pkm.config.yaml_tree import Node, Place, Scalar


def check_arguments(given: Mapping[str, Any], schema: type[BaseModel]) -> Checked:
    """What they make; its mistakes name the setting and no place, for there is no file."""
    return check_tree(_node(given), schema, "")


def _node(value: Any) -> Node:
    nowhere = Place("", 0)
    if isinstance(value, Mapping):
        return Node({str(key): _node(inner) for key, inner in value.items()}, nowhere)
    if isinstance(value, list | tuple):
        return Node([_node(inner) for inner in value], nowhere)
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else str(value)
    return Node(Scalar(text, plain=True), nowhere)
