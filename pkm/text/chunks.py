"""Split text into chunks that can be tokenized independently, each marked with the context that it needs.

Chunks are what white space separates. Moses' rules look past a space in few cases only. A key is a chunk with a mark for
each of those cases, so that equal keys have equal tokens wherever they stand:

- a chunk that ends in a full stop, with whether the next one starts in lower case, with an ASCII digit or otherwise;
- a chunk that ends a line, if it ends in a full stop, comma or apostrophe;
- a chunk that starts a line, if it starts with a comma or an apostrophe.

Lines with an apostrophe on both sides of a space (the rules use that space once), with control characters (Moses
deletes them, which joins chunks, and the marks are such characters), or with Moses' own marks for dots are one key each.
"""

from __future__ import annotations

import re

from pkm.text.moses_rules import (
    ASCII_CONTROLS,
    escape_text,
    split_marks,
    split_symbols,
    splits_full_stop,
    tokenize_line,
    unmark_dots,
)
from pkm.text.perl_classes import LOWER, SPACE_CHARACTERS

NEWLINE = "\n"
"""The key between lines, and after the last."""

_BEFORE_LOWER, _BEFORE_DIGIT, _BEFORE_OTHER, _ENDS_LINE, _STARTS_LINE, _WHOLE_LINE = "\1\2\3\4\5\6"
_FOLLOWING = {_BEFORE_LOWER: "a", _BEFORE_DIGIT: "0", _BEFORE_OTHER: ""}
_DELETED = bytes(i for i in range(32) if chr(i) not in SPACE_CHARACTERS)
_DELETE = dict.fromkeys(_DELETED)
_ASCII_SPACES = sorted(c for c in SPACE_CHARACTERS - {" ", NEWLINE} if c.isascii())
_OTHER_SPACES = sorted(c for c in SPACE_CHARACTERS if not c.isascii())
_NO_CONTEXT = re.compile("[^.,']+[.,]?\\Z")
_STOP_BEFORE_LOWER = re.compile(f"\\. (?=[{LOWER}])")
_STOP_BEFORE_DIGIT = re.compile(r"\. (?=[0-9])")


def document_keys(text: str) -> list[str]:
    """Keys of a text's chunks in order, NEWLINE after each line's; blank lines are left out."""
    text = _plain_spaces(f"\n{text}\n")
    if text == NEWLINE:
        return []
    if "' '" in text or "DOTMULTI" in text or _has_deleted(text):
        return [key for line in text.split(NEWLINE) for key in _suspicious_line_keys(line)]
    return _keys(text)


def without_odd_spaces(text: str) -> str:
    """A text as the tokenizer reads it: equal for two texts that differ in white space or in deleted characters only.

    Runs of white space are one space, or one newline where they hold one; none at either end; no blank lines.
    """
    if _has_deleted(text):
        text = text.translate(_DELETE)
    return _plain_spaces(f"\n{text}\n").strip(NEWLINE)


def key_tokens(key: str, escape: bool) -> str:
    """A key's tokens with single spaces between, exactly as they stand in Moses' output for the line."""
    if key[0] == _WHOLE_LINE:
        return tokenize_line(key[1:], escape)
    if key.isalnum() and key.isascii():
        return key
    starts, mark = key[0] == _STARTS_LINE, key[-1]
    chunk = key[starts : -1 if mark in _FOLLOWING or mark == _ENDS_LINE else None]
    ends = mark == _ENDS_LINE
    if _NO_CONTEXT.match(chunk) and not starts:
        text = _plain_tokens(chunk, _FOLLOWING.get(mark))
    else:
        text = _context_tokens(chunk, starts, ends, _FOLLOWING.get(mark))
    return escape_text(text) if escape else text


def _plain_tokens(chunk: str, following: str | None) -> str:
    """A chunk without dots, commas or apostrophes but for one dot or comma at its end: only symbols are split."""
    stem, end = (chunk[:-1], chunk[-1]) if chunk[-1] in ".," else (chunk, "")
    text = split_symbols(stem)
    word = text.rpartition(" ")[2]
    if end == "." and word and following is not None and not splits_full_stop(word, following):
        text += end
    elif end:
        text = f"{text} {end}"
    return text if word == stem else " ".join(text.split())


def _context_tokens(chunk: str, starts: bool, ends: bool, following: str | None) -> str:
    text = split_marks(("" if starts else " ") + chunk + ("" if ends else " "))
    words = text[not starts : None if ends else -1].split(" ")
    tokens = _split_full_stops(words, following, ends)
    text = unmark_dots(" ".join(tokens))
    return f"{text[:-2]} . ' " if ends and text.endswith(".'") else text


def _split_full_stops(words: list[str], following: str | None, ends: bool) -> list[str]:
    """As moses_rules.split_full_stops, for one chunk: `following` stands for what comes after the last word."""
    while ends and not words[-1]:
        words.pop()
    last = len(words) - 1
    tokens: list[str] = []
    for i, word in enumerate(words):
        if len(word) > 1 and word[-1] == ".":
            after = words[i + 1] if i < last else following
            if after is None or splits_full_stop(word[:-1], after):
                tokens += (word[:-1], ".")
                continue
        if word:
            tokens.append(word)
    return tokens


def _plain_spaces(text: str) -> str:
    """Every run of white space to one space, or to one newline where it holds one."""
    for space in _ASCII_SPACES if text.isascii() else (*_ASCII_SPACES, *_OTHER_SPACES):
        text = text.replace(space, " ")
    while "  " in text:
        text = text.replace("  ", " ")
    text = text.replace(" \n", NEWLINE).replace("\n ", NEWLINE)
    while "\n\n" in text:
        text = text.replace("\n\n", NEWLINE)
    return text


def _has_deleted(text: str) -> bool:
    """Whether the text holds control characters that Moses deletes."""
    data = text.encode("utf-8", "surrogatepass")
    return len(data.translate(None, _DELETED)) < len(data)


def _suspicious_line_keys(line: str) -> list[str]:
    if "' '" not in line and "DOTMULTI" not in line and not _has_deleted(line):
        return _keys(f"\n{line}\n") if line else []
    # Blank only once its control characters are gone: no tokens, so no line.
    return [_WHOLE_LINE + line, NEWLINE] if ASCII_CONTROLS.sub("", line).strip(" ") else []


def _keys(text: str) -> list[str]:
    """Keys of whole lines that stand between newlines."""
    text = _STOP_BEFORE_LOWER.sub(f".{_BEFORE_LOWER} ", text)
    text = _STOP_BEFORE_DIGIT.sub(f".{_BEFORE_DIGIT} ", text)
    text = text.replace(". ", f".{_BEFORE_OTHER} ")
    for end in ".,'":
        text = text.replace(f"{end}\n", f"{end}{_ENDS_LINE}\n")
    for start in ",'":
        text = text.replace(f"\n{start}", f"\n{_STARTS_LINE}{start}")
    return text.replace(NEWLINE, " \n ").split(" ")[2:-1]
