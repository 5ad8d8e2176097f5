"""Tokens of Moses back to readable English text, by the rules of Moses' detokenizer."""

from __future__ import annotations

import re
from collections import Counter

from pkm.text.perl_classes import ALNUM, ALPHA, CURRENCY, SPACE

_BLANK_OR_TAG = re.compile(f"<.+>\\Z|[{SPACE}]*\\Z")
_SPACES = re.compile(" +")
_CJK = re.compile(
    "[\u1100-\u11ff\u2e80-\ua4cf\ua840-\ua87f\uac00-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff65-\uffdc\U00020000-\U0002ffff]"
)
_OPENS = re.compile(f"[{CURRENCY}(\\[{{\u00bf\u00a1]+\\Z")
_CLOSES = re.compile(r"[,.?!:;\\%}\])]+\Z")
_CONTRACTION = re.compile(f"'[{ALPHA}]")
_ENDS_ALNUM = re.compile(f"[{ALNUM}]\\Z")
_QUOTES = re.compile("['\"\u201e\u201c`]+\\Z")
_LOW_OR_HIGH_QUOTES = re.compile("[\u201e\u201c\u201d]+\\Z")
_ENTITIES = (
    ("&bar;", "|"), ("&#124;", "|"), ("&lt;", "<"), ("&gt;", ">"), ("&bra;", "["), ("&ket;", "]"), ("&quot;", '"'),
    ("&apos;", "'"), ("&#91;", "["), ("&#93;", "]"), ("&amp;", "&"),
)  # fmt: skip


def detokenize(line: str) -> str:
    """One line of space-separated tokens, escaped or not -> text.

    Quotation marks are paired in the order they come, so an odd one shifts those after it; the spacing of the
    original is not recoverable where Moses dropped it.
    """
    if _BLANK_OR_TAG.match(line):
        return line
    text = unescape(f" {line} ".replace(" @-@ ", "-"))
    words = text.split(" ")
    pieces: list[str] = []
    seen: Counter[str] = Counter()
    space = " "
    for i, word in enumerate(words):
        before = words[i - 1] if i else ""
        joins_left, joins_right = _joins(word, before, i > 0, seen)
        pieces.append(word if joins_left else space + word)
        space = "" if joins_right else " "
    return _SPACES.sub(" ", "".join(pieces)).removeprefix(" ").removesuffix(" ")


def unescape(text: str) -> str:
    """Entities written by Moses' escaping (and its older names for them) -> characters."""
    if "&" in text:
        for entity, character in _ENTITIES:
            text = text.replace(entity, character)
    return text


def _joins(word: str, before: str, inside: bool, seen: Counter[str]) -> tuple[bool, bool]:
    """(no space before the word, none after it); counts quotation marks in `seen`."""
    if _CJK.match(word):
        return bool(before) and _CJK.match(before[-1]) is not None, False
    if _OPENS.match(word):
        return False, True
    if _CLOSES.match(word):
        return True, False
    if inside and _CONTRACTION.match(word) and _ENDS_ALNUM.search(before):
        return True, False
    if _QUOTES.match(word):
        return _quote_joins(word, before, inside, seen)
    return False, False


def _quote_joins(word: str, before: str, inside: bool, seen: Counter[str]) -> tuple[bool, bool]:
    """An odd quotation mark opens, an even one closes; `'` after a word in s is a possessive."""
    kind = '"' if _LOW_OR_HIGH_QUOTES.match(word) else word
    opens = seen[kind] % 2 == 0
    if opens and word == "'" and inside and before.endswith("s"):
        return True, False
    seen[kind] += 1
    return not opens, opens
