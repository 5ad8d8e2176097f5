"""What reading gives: an article's text, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Skipped:
    """A record that gave no article.

    kind   damaged: it cannot be read; too_large: over the set size; not_an_article: sound, but an image, say
    where  file and line, byte or row group
    lost   bytes on disk that could not be read because of it, beyond the record itself
    """

    kind: Literal["damaged", "too_large", "not_an_article"]
    where: str
    why: str
    lost: int = 0


Found = str | Skipped


def decoded(data: bytes, where: str) -> Found:
    """The text of UTF-8 bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        why = f"not UTF-8: byte 0x{data[error.start]:02x} at {error.start}"
        if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            why += " (it begins like UTF-16)"
        return Skipped("damaged", where, why)


def too_large(where: str, limit: int) -> Skipped:
    """A record of more than `limit` bytes."""
    return Skipped("too_large", where, f"larger than {limit / 2**20:g} MB")
