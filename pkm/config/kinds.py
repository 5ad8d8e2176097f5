"""The kinds of memory that a config can name: of each who builds it and who counts what it costs.

A new kind is a line here. Builders and costs are named, as "module:name", and not imported: a config is read without torch
and before anything that is built from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError


class Kind(NamedTuple):
    build: str
    """Takes a MemoryConfig (keys: and which of its section's memories it is for, from 0, and the layer; a read, a gate: and the
    model's width) and makes a module; a read also its own tables, by the names
    that they have in it, if they are another memory's."""
    cost: str
    """Takes a MemoryConfig and the model's width and makes a pkm.memory.cost.Cost, without torch."""


KEYS: dict[str, Kind] = {
    "product": Kind("pkm.memory.keys:product_keys", "pkm.memory.cost:product_keys"),
    "flat": Kind("pkm.memory.keys:flat_keys", "pkm.memory.cost:flat_keys"),
    "tucker": Kind("pkm.memory.tucker:tucker_keys", "pkm.memory.cost:tucker_keys"),
    "ngram": Kind("pkm.memory.ngram:ngram_keys", "pkm.memory.cost:ngram_keys"),
}
"""Which slots a token reads: an object with the methods of pkm.memory.keys.Keys."""

READS: dict[str, Kind] = {
    "rows": Kind("pkm.memory.read:rows", "pkm.memory.cost:rows"),
    "experts": Kind("pkm.memory.read:experts", "pkm.memory.cost:experts"),
    "experts-linear": Kind("pkm.memory.read:linear_experts", "pkm.memory.cost:linear_experts"),
}
"""What a slot gives: an object with the methods of pkm.memory.read.Read."""

GATES: dict[str, Kind] = {
    "none": Kind("pkm.memory.output:as_it_is", "pkm.memory.cost:as_it_is"),
    "silu": Kind("pkm.memory.output:silu_gate", "pkm.memory.cost:silu_gate"),
    "engram": Kind("pkm.memory.ngram:context_gate", "pkm.memory.cost:context_gate"),
}
"""What becomes of what was read: an object with the methods of pkm.memory.output.Output."""


def named(place: str) -> Any:
    """What is called "module:name"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def one_of(kinds: Mapping[str, Kind]) -> tuple[AfterValidator, Any]:
    """For a setting's annotation: one of these names, those that are there when a config is read."""

    def known(name: str) -> str:
        if name not in kinds:
            raise PydanticCustomError("enum", "must be one of: {names}", {"names": ", ".join(kinds)})
        return name

    return AfterValidator(known), Field(json_schema_extra=lambda schema: schema.update(enum=list(kinds)))
