"""The rules of the Moses tokenizer for English, applied to a whole line: slow, literal, the definition of correct.

They follow `tokenizer.perl -l en` rule by rule, in its order, because rules consume each other's spaces and their
order shows in the output. `moses.py` runs the same rules on single chunks and remembers the results.
"""

from __future__ import annotations

import re

from pkm.text.perl_classes import ALNUM, ALPHA, LOWER, NUMBER, SPACE

ABBREVIATIONS = frozenset(
    """
    A B C D E F G H I J K L M N O P Q R S T U V W X Y Z
    Adj Adm Adv Asst Bart Bldg Brig Bros Capt Cmdr Col Comdr Con Corp Cpl DR Dr Drs Ens Gen Gov Hon Hosp Hr Insp Lt MM
    MR MRS MS Maj Messrs Mlle Mme Mr Mrs Ms Msgr Nos Nr Op Ord Pfc Ph Prof Pvt Rep Reps Res Rev Rs Rt Sen Sens Sfc Sgt
    Sr St Supt Surg e.g i.e rev v vs Jan Feb Mar Apr Jun Jul Aug Sep Oct Nov Dec
    """.split()  # noqa: SIM905, a list of words reads better
)
"""Words that keep their full stop (Moses' nonbreaking_prefix.en)."""

ABBREVIATIONS_BEFORE_DIGITS = frozenset(("Art", "No", "pp"))
"""Words that keep it only before a digit: `No. 5`."""

_SPACES = re.compile(f"[{SPACE}]+")
_BLANK = re.compile(f"[{SPACE}]*\\Z")
ASCII_CONTROLS = re.compile("[\\x00-\\x1f]+")
_SYMBOL = re.compile(f"([^{ALNUM}{SPACE}.'`,\\-])")
_DOTS = re.compile(r"\.(\.+)")
_MARKED_DOTS = re.compile(r"DOTMULTI(\.+)")
_COMMA_AFTER = re.compile(f"([^{NUMBER}]),")
_COMMA_BEFORE = re.compile(f",([^{NUMBER}])")
_COMMA_ENDS_LINE = re.compile(f"([{NUMBER}]),\\Z")
_NO_ALPHA_BOTH_SIDES = re.compile(f"([^{ALPHA}])'([^{ALPHA}])")
_NO_LETTER_OR_NUMBER_BEFORE = re.compile(f"([^{ALPHA}{NUMBER}])'([{ALPHA}])")
_NO_ALPHA_AFTER = re.compile(f"([{ALPHA}])'([^{ALPHA}])")
_CONTRACTION = re.compile(f"([{ALPHA}])'([{ALPHA}])")
_YEARS = re.compile(f"([{NUMBER}])'(s)")
_HAS_ALPHA = re.compile(f"[{ALPHA}]")
_STARTS_LOWER = re.compile(f"[{LOWER}]")
_STARTS_DIGIT = re.compile("[0-9]")
_STOP_QUOTE_ENDS_LINE = re.compile(r"\.' ?\Z")
_ESCAPES = (
    ("&", "&amp;"), ("|", "&#124;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&apos;"), ('"', "&quot;"),
    ("[", "&#91;"), ("]", "&#93;"),
)  # fmt: skip


def tokenize_line(line: str, escape: bool = False) -> str:
    """One line without its newline -> its tokens with single spaces between, as Moses prints them.

    A line of nothing but white space is returned as it is, and a closing `.'` leaves a trailing space: both are
    what the Perl script prints.
    """
    if is_blank(line):
        return line
    text = _squeeze(ASCII_CONTROLS.sub("", _SPACES.sub(" ", line)))
    text = split_marks(text)
    text = _squeeze(split_full_stops(text))
    text = _STOP_QUOTE_ENDS_LINE.sub(" . ' ", text)
    text = unmark_dots(text)
    return escape_text(text) if escape else text


def is_blank(line: str) -> bool:
    """Whether a line holds nothing but white space, as perl knows it."""
    return _BLANK.match(line) is not None


def split_symbols(text: str) -> str:
    """Spaces around whatever is no letter, digit or space nor one of . ' ` , -"""
    return text if text.isascii() and text.isalnum() else " ".join(_SYMBOL.split(text))


def split_marks(text: str) -> str:
    """Spaces around symbols, runs of dots, commas outside numbers, and English apostrophes.

    A rule's match takes the characters beside its mark with it, so of two marks in a row it may see one: no lookaround.
    """
    # Replacements are functions, because Python 3.11 parses a template with groups anew at every call.
    text = split_symbols(text)
    if ".." in text:
        text = _DOTS.sub(lambda m: f" DOTMULTI{m[1]}", text)
    if "DOTMULTI." in text:
        text = _mark_dots(text)
    if "," in text:
        text = _COMMA_AFTER.sub(lambda m: f"{m[1]} , ", text)
        text = _COMMA_BEFORE.sub(lambda m: f" , {m[1]}", text)
        text = _COMMA_ENDS_LINE.sub(lambda m: f"{m[1]} ,", text)
    if "'" in text:
        text = _NO_ALPHA_BOTH_SIDES.sub(_apart, text)
        text = _NO_LETTER_OR_NUMBER_BEFORE.sub(_apart, text)
        text = _NO_ALPHA_AFTER.sub(_apart, text)
        text = _CONTRACTION.sub(_contracted, text)
        text = _YEARS.sub(_contracted, text)
    return text


def _mark_dots(text: str) -> str:
    """Every dot behind a mark becomes a `DOT` before it, and a space keeps the mark from what follows.

    The script moves one dot of every mark at a time. In its first round it does not see a mark with a single dot right
    behind another such one, because it has taken that mark's first letter with the dot before.
    """
    taken = -1

    def moved(match: re.Match[str]) -> str:
        nonlocal taken
        dots, end = len(match[1]), match.end()
        if end == len(text) or (dots == 1 and match.start() == taken):
            return "DOT" * dots + "DOTMULTI"
        if dots == 1:
            taken = end
        return "DOT" * dots + "DOTMULTI "

    return _MARKED_DOTS.sub(moved, text)


def _apart(match: re.Match[str]) -> str:
    return f"{match[1]} ' {match[2]}"


def _contracted(match: re.Match[str]) -> str:
    return f"{match[1]} '{match[2]}"


def split_full_stops(text: str) -> str:
    """Split the full stop off every word that is neither an abbreviation nor followed by lower case."""
    words = text.split(" ")
    while words and not words[-1]:
        words.pop()
    last = len(words) - 1
    for i, word in enumerate(words):
        if len(word) > 1 and word[-1] == "." and (i == last or splits_full_stop(word[:-1], words[i + 1])):
            words[i] = word[:-1] + " ."
    return " ".join(words)


def splits_full_stop(word: str, following: str) -> bool:
    """Whether `word` + "." inside a line is a word and a full stop, given the word that follows (may be "")."""
    if "." in word and _HAS_ALPHA.search(word):
        return False
    if word in ABBREVIATIONS or _STARTS_LOWER.match(following):
        return False
    return not (word in ABBREVIATIONS_BEFORE_DIGITS and _STARTS_DIGIT.match(following))


def unmark_dots(text: str) -> str:
    """Runs of dots, marked by split_marks, back to dots."""
    if "DOTMULTI" not in text:
        return text
    *marked, rest = text.split("DOTMULTI")
    pieces: list[str] = []
    for piece in marked:
        end = len(piece)
        while piece.endswith("DOT", 0, end):
            end -= 3
        pieces += (piece[:end], "." * (1 + (len(piece) - end) // 3))
    return "".join([*pieces, rest])


def escape_text(text: str) -> str:
    """The characters that Moses' phrase tables and XML reserve, as entities."""
    for character, entity in _ESCAPES:
        if character in text:
            text = text.replace(character, entity)
    return text


def _squeeze(text: str) -> str:
    """Runs of spaces to one; none at either end."""
    return " ".join(filter(None, text.split(" ")))
