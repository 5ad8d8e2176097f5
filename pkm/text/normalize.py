"""The normalising chain of the paper's own code base (XLM), which runs before Moses tokenizes.

replace-unicode-punctuation | normalize-punctuation -l en | remove-non-printing-char, with their rules in their order:
later rules see what earlier ones wrote, and the ASCII rules for digits and letters stay ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pkm.text.perl_classes import OTHER

# Full-width forms; CJK stops, commas and brackets; typographic marks. None of them makes another of them.
_ASCII_FORMS = (
    ("\uff0c", ","), ("\uff1a", ":"), ("\uff1f", "?"), ("\uff09", ")"), ("\uff01", "!"), ("\uff08", "("), ("\uff1b", ";"),
    ("\uff10", "0"), ("\uff11", "1"), ("\uff12", "2"), ("\uff13", "3"), ("\uff14", "4"), ("\uff15", "5"), ("\uff16", "6"),
    ("\uff17", "7"), ("\uff18", "8"), ("\uff19", "9"), ("\uff0e", ". "), ("\uff5e", "~"), ("\uff05", "%"),
    ("\u3002", ". "), ("\u3001", ","), ("\u300a", '"'), ("\u300b", '"'), ("\u300c", '"'), ("\u300d", '"'),
    ("\u3008", "<"), ("\u3009", ">"), ("\u3010", "["), ("\u3011", "]"),
    ("\u201c", '"'), ("\u201d", '"'), ("\u2019", "'"), ("\u2026", "..."), ("\u2236", ":"), ("\u2501", "-"),
)  # fmt: skip
_STOP_AND_SPACES = re.compile("([\u3002\uff0e]) +")
_BRACKET_SPACE_MARK = re.compile(r"\) ([.!:?;,])")
_DIGIT_SPACE_PERCENT = re.compile("([0-9]) %")
_DIGIT_NBSP_DIGIT = re.compile("([0-9])\u00a0([0-9])")
_LETTER_QUOTE_LETTER = re.compile("([a-zA-Z])\u2018([a-zA-Z])")
_QUOTE_STOPS = re.compile('"([,.]+)')
_NOT_PRINTING = re.compile(f"[{OTHER}]")
_NBSP = "\u00a0"
_DASHES_AND_ACUTES = (("\u201e", '"'), ("\u2013", "-"), ("\u2014", " - "), ("\u00b4", "'"))
_LATE_QUOTES = (
    ("\u2018", "'"), ("\u201a", "'"), ("''", '"'),
    (" \u00ab ", ' "'), ("\u00ab ", '"'), ("\u00ab", '"'), (" \u00bb ", '" '), (" \u00bb", '"'), ("\u00bb", '"'),
)  # fmt: skip
_NBSP_RULES = (
    ("\u00a0%", "%"), ("n\u00ba\u00a0", "n\u00ba "), ("\u00a0:", ":"), ("\u00a0\u00baC", " \u00baC"),
    ("\u00a0cm", " cm"), ("\u00a0?", "?"), ("\u00a0!", "!"), ("\u00a0;", ";"), (",\u00a0", ", "),
)  # fmt: skip


def normalize_xlm(text: str) -> str:
    """Text of any number of lines -> the same lines as XLM hands them to the tokenizer.

    No rule looks across a newline and none makes or removes one; carriage returns go.
    """
    text = _marks(_ascii_forms(text.replace("\r", "")))
    if "'" in text or "`" in text:
        text = text.replace("`", "'").replace("''", ' " ')
    if not text.isascii():
        text = _quotes_and_dashes(text)
    text = _squeeze(text)
    if '",' in text or '".' in text:
        text = _QUOTE_STOPS.sub(lambda match: f'{match[1]}"', text)
    if _NBSP in text:
        text = _DIGIT_NBSP_DIGIT.sub(r"\1.\2", text)
    return _drop_not_printing(text)


def _ascii_forms(text: str) -> str:
    """Full-width and typographic punctuation and digits -> ASCII."""
    if text.isascii():
        return text
    if "\u3002" in text or "\uff0e" in text:
        text = _STOP_AND_SPACES.sub(r"\1", text)
    return _replace(text, _ASCII_FORMS)


def _marks(text: str) -> str:
    """No spaces inside brackets or before marks, one space outside brackets, none doubled."""
    text = _squeeze(text.replace("(", " (").replace(")", ") "))
    if ")" in text:
        text = _BRACKET_SPACE_MARK.sub(lambda match: f"){match[1]}", text)
    text = text.replace("( ", "(").replace(" )", ")")
    if " %" in text:
        text = _DIGIT_SPACE_PERCENT.sub(r"\1%", text)
    return text.replace(" :", ":").replace(" ;", ";")


def _quotes_and_dashes(text: str) -> str:
    """What is left of quotation marks and dashes -> ASCII; no-break spaces before marks dropped."""
    text = _squeeze(_replace(text, _DASHES_AND_ACUTES))
    if "\u2018" in text:
        text = _LETTER_QUOTE_LETTER.sub(r"\1'\2", text)
    text = _replace(text, _LATE_QUOTES)
    return _replace(text, _NBSP_RULES) if _NBSP in text else text


def _drop_not_printing(text: str) -> str:
    """Code points of class C, other than newlines, -> spaces."""
    lines = text.split("\n")
    # Python and perl agree on what is printable in ASCII only.
    return "\n".join(x if x.isascii() and x.isprintable() else _NOT_PRINTING.sub(" ", x) for x in lines)


def _replace(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    for found, written in pairs:
        text = text.replace(found, written)
    return text


def _squeeze(text: str) -> str:
    """Runs of spaces to one."""
    while "  " in text:
        text = text.replace("  ", " ")
    return text
