"""Where a text may be cut so that the ids of its parts, one after the other, are those of the whole.

The library splits text before it merges, and merges nothing across a split. The patterns known here always split before a
single space that stands between two characters that are no white space: none of their alternatives goes on from such a
character to a space, and none looks back or, from there, ahead. So most of a text is one look-up a word.
"""

from __future__ import annotations

import json
import re
from typing import Any

CUT = re.compile(r"(?<=\S)(?= \S)")
"""Python's white space holds all that the library's patterns call so, and four characters more: it only cuts less often."""

_GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = frozenset((_GPT_4 % "{1,3}", _GPT_4 % ""))
"""Of GPT-4 and Llama 3, and of Qwen 2. GPT-2's is the library's own ByteLevel."""


def cuts_before_spaces(content: bytes) -> bool:
    """Whether a tokenizer.json is byte-level BPE that splits as above, with nothing that comes before or reaches farther.

    A normalizer might join characters, and a token that was added and is no special one is looked for in the whole text.
    """
    file = json.loads(content)
    model = file["model"]
    plain = not any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix"))
    added = all(token["special"] for token in file.get("added_tokens") or ())
    bpe = model.get("type") == "BPE" and plain and added and file.get("normalizer") is None
    return bpe and _splits_known(file.get("pre_tokenizer") or {})


def _splits_known(split: dict[str, Any]) -> bool:
    if split.get("type") == "Sequence":
        steps = split["pretokenizers"]
        return len(steps) == 2 and _is_pattern(steps[0]) and _is_bytes(steps[1], use_regex=False)
    return _is_bytes(split, use_regex=True)


def _is_pattern(step: dict[str, Any]) -> bool:
    known = step.get("type") == "Split" and step["pattern"].get("Regex") in PATTERNS
    return known and step["behavior"] == "Isolated" and not step["invert"]


def _is_bytes(step: dict[str, Any], use_regex: bool) -> bool:
    same = step.get("type") == "ByteLevel" and step.get("use_regex", True) == use_regex
    return same and not step["add_prefix_space"]
