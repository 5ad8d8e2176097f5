"""What reading gives: an article's text, or why there is none."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Literal


class Damaged(Exception):
    """A file or record that cannot be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A record that gave no article.

    kind     damaged: it cannot be read; too_large: over the set size; not_an_article: sound, but an image, say
    where    file and line, byte or row group
    lost     bytes on disk that could not be read because of it, beyond the record itself
    records  how many records it stands for: all that a damaged row group holds, say
    """

    kind: Literal["damaged", "too_large", "not_an_article"]
    where: str
    why: str
    lost: int = 0
    records: int = 1


Found = str | Skipped


def article(text: str, where: str) -> Found:
    """A text as all that comes later may take it: characters that UTF-8 can hold, no byte order mark in front.

    Every text goes through here once, whatever it was stored in.
    """
    text = text.removeprefix("\ufeff")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            why = f"half a surrogate pair (U+{ord(text[error.start]):04X}), which no text can hold"
            return Skipped("damaged", where, why)
    return text


def decoded(data: bytes, where: str) -> Found:
    """The text of UTF-8 bytes."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        why = f"not UTF-8: byte 0x{data[error.start]:02x} at {error.start}"
        if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            why += " (it begins like UTF-16)"
        return Skipped("damaged", where, why)
    # Text in UTF-16 without a mark passes for UTF-8 with a NUL beside every letter.
    if 4 * data.count(0) > len(data):
        return Skipped("damaged", where, "not text: over a quarter of its bytes are NUL (UTF-16 without a mark?)")
    return article(text, where)


def too_large(where: str, limit: int, records: int = 1) -> Skipped:
    """A record of more than `limit` bytes."""
    return Skipped("too_large", where, f"larger than {limit / 2**20:g} MB", records=records)
