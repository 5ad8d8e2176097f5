"""What a schema allows at one place of a file, in plain words, and how the text written there is read.

Everything is taken from the JSON schema that pydantic makes of a model: the same that editors complete keys from.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

from pkm.config.yaml_tree import Scalar

NULLS = ("", "~", "null", "Null", "NULL")
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
INTEGER = re.compile(r"[-+]?(0|[1-9]\d*|[1-9]\d{0,2}(_\d{3})+)")
NUMBER = re.compile(r"[-+]?((0|[1-9]\d*|[1-9]\d{0,2}(_\d{3})+)(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
NOT_FINITE = re.compile(r"[-+]?\.?(inf|Inf|INF|nan|NaN|NAN)")
# What choices are called elsewhere.
USUAL_NAMES = {
    "gpu": "cuda",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "single": "fp32",
}
KINDS = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
KIND_OF = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}


class Mismatch(Exception):
    """The text is of another kind than the setting; carries how to fix that, if it can be told."""

    def __init__(self, fix: str | None = None):
        self.fix = fix
        super().__init__(fix)


@dataclass(frozen=True)
class SchemaNode:
    """A node of a JSON schema, and the definitions that it refers to."""

    schema: dict[str, Any]
    definitions: dict[str, Any]

    @classmethod
    @cache  # pydantic takes longer to make a schema than a config takes to read
    def by(cls, model: type[BaseModel]) -> SchemaNode:
        schema = model.model_json_schema()
        return cls(schema, schema.get("$defs", {}))

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The schema taken apart: one entry for each kind of thing that may stand here."""
        return list(self._choices(self.schema))

    def _choices(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "$ref" in schema:
            yield from self._choices(self.definitions[schema["$ref"].rsplit("/", 1)[-1]])
        elif several := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
            for one in several:
                yield from self._choices(one)
        else:
            yield schema

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset().union(*(_kinds(choice) for choice in self.choices))

    def section(self, given: dict[str, Any]) -> dict[str, SchemaNode] | None:
        """The keys that a section with the scalars `given` may have; None if any key will do."""
        objects = [choice for choice in self.choices if "properties" in choice]
        if not objects or any(choice.get("additionalProperties", True) is not False for choice in objects):
            return None
        # Of several kinds of section, those that a constant key (`kind: jsonl`) leaves.
        fitting = [choice for choice in objects if _constants_agree(choice, given)] or objects
        return {
            key: SchemaNode(child, self.definitions) for each in fitting for key, child in each["properties"].items()
        }

    def value(self, key: str) -> SchemaNode:
        """What an open section may hold under `key`."""
        for choice in self.choices:
            child = choice.get("properties", {}).get(key, choice.get("additionalProperties"))
            if isinstance(child, dict):
                return SchemaNode(child, self.definitions)
        return SchemaNode({}, self.definitions)

    def item(self, index: int) -> SchemaNode:
        """What a list may hold at `index`."""
        for choice in self.choices:
            if index < len(choice.get("prefixItems", ())):
                return SchemaNode(choice["prefixItems"][index], self.definitions)
            if isinstance(choice.get("items"), dict):
                return SchemaNode(choice["items"], self.definitions)
        return SchemaNode({}, self.definitions)

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Every dotted key of every section below."""
        for key, child in (self.section({}) or {}).items():
            yield prefix + key
            yield from child.keys(f"{prefix}{key}.")

    @property
    def words(self) -> str:
        """What may stand here: `a whole number > 0, or null`."""
        choices = sorted(self.choices, key=lambda choice: choice.get("type") == "null")
        return ", or ".join(dict.fromkeys(_words(choice, self) for choice in choices))

    def read(self, scalar: Scalar) -> Any:
        """The value of a scalar, read as the kind that is wanted here. Raises Mismatch."""
        kinds, text = self.kinds, scalar.text
        if scalar.plain:
            if text in NULLS:
                if "null" in kinds:
                    return None
                says_none = self.nearest_choice("null") == "none"
                raise Mismatch("write none" if says_none else "give a value, or remove the key")
            if "boolean" in kinds and text.lower() in BOOLEANS:
                return BOOLEANS[text.lower()]
            if "integer" in kinds and INTEGER.fullmatch(text) and len(text) < 1000:
                return int(text.replace("_", ""))
            if "number" in kinds and NUMBER.fullmatch(text):
                return float(text.replace("_", ""))
            if "number" in kinds and NOT_FINITE.fullmatch(text):
                return float(text.replace(".", ""))
        if "string" in kinds:
            return text
        raise Mismatch(_trap(scalar, kinds))

    def nearest_choice(self, text: str) -> str | None:
        """The allowed word that `text` most likely means."""
        words = [word for choice in self.choices for word in _constants(choice) if isinstance(word, str)]
        if "none" in words and text.lower() in ("off", "no", "false", "null", "~", ""):
            return "none"
        usual = USUAL_NAMES.get(text.lower())
        return usual if usual in words else nearest(text, words)


def nearest(word: str, words: list[str], cutoff: float = 0.6) -> str | None:
    """The spelling in `words` nearest to `word`."""
    spellings = {w.lower().replace("-", "_"): w for w in words}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), spellings, 1, cutoff)
    return spellings[found[0]] if found else None


def _constants(choice: dict[str, Any]) -> list[Any]:
    return [choice["const"]] if "const" in choice else choice.get("enum", [])


def _kinds(choice: dict[str, Any]) -> frozenset[str]:
    if constants := _constants(choice):
        return frozenset(KIND_OF[type(constant)] for constant in constants)
    kind = choice.get("type")
    return KINDS if kind is None else frozenset([kind] if isinstance(kind, str) else kind)


def _constants_agree(choice: dict[str, Any], given: dict[str, Any]) -> bool:
    tags = {key: constants for key, child in choice["properties"].items() if (constants := _constants(child))}
    return all(given[key] in constants for key, constants in tags.items() if key in given)


BOUNDS = (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<="))


def _words(choice: dict[str, Any], allowed: SchemaNode) -> str:
    if constants := _constants(choice):
        words = {None: "null", True: "true", False: "false"}
        listed = ", ".join(words.get(constant, str(constant)) for constant in constants)
        return listed if len(constants) == 1 else f"one of: {listed}"
    name = {
        "null": "null",
        "boolean": "true or false",
        "integer": "a whole number",
        "number": "a number",
        "string": "a path" if choice.get("format") in ("path", "file-path", "directory-path") else "text",
        "object": "a section of keys",
        "array": "a list",
    }.get(choice.get("type", ""), "any value")
    bounds = " and ".join(f"{sign} {choice[key]}" for key, sign in BOUNDS if key in choice)
    if choice.get("type") == "array":
        return _list_words(choice, allowed)
    if pattern := choice.get("patternErrorMessage") or choice.get("pattern"):
        return f"{name}: {pattern}"
    return f"{name} {bounds}" if bounds else name


def _list_words(choice: dict[str, Any], allowed: SchemaNode) -> str:
    fixed = len(choice.get("prefixItems", ()))
    least, most = choice.get("minItems", 0), choice.get("maxItems")
    size = f"{fixed} values" if fixed else f"at least {least} values" if least else ""
    size = f"{least} values" if least and least == most else size
    item = SchemaNode(choice["prefixItems"][0] if fixed else choice.get("items", {}), allowed.definitions).words
    return f"a list of {size}, each {item}" if size else f"a list, each item {item}"


def _trap(scalar: Scalar, kinds: frozenset[str]) -> str | None:
    """How to fix text that YAML, or a reader, may take for a number that it is not."""
    text = scalar.text
    wants_number = bool(kinds & {"integer", "number"})
    if not scalar.plain:
        asked = (wants_number and NUMBER.fullmatch(text)) or ("boolean" in kinds and text.lower() in BOOLEANS)
        return f"remove the quotes: {text}" if asked else None
    if "null" in kinds and text.lower() in ("off", "no", "false", "none"):
        return "write null for none"
    if not wants_number:
        return None
    if re.fullmatch(r"[-+]?0[0-7_]+", text):
        octal = int(text.replace("_", ""), 8)
        return f"a leading zero makes YAML read octal ({octal}): write {int(text.replace('_', ''))} or {octal}"
    if re.fullmatch(r"\d+(:[0-5]?\d)+(\.\d*)?", text):
        return "YAML 1.1 reads colons as base 60: write one decimal number"
    if re.fullmatch(r"[-+]?0[xob][0-9a-fA-F_]+", text):
        return "write a decimal number"
    if re.fullmatch(r"[-+]?[\d_]*_[\d_]*", text):
        return f"write {text.replace('_', '')}: underscores may only part groups of three digits"
    if NUMBER.fullmatch(text) and float(text.replace("_", "")).is_integer():
        return f"write {int(float(text.replace('_', '')))}, without point or exponent"
    return None
