"""Ids that read alike, under one number: what n-gram memories address with (Engram, 2026, "tokenizer compression")."""

from __future__ import annotations

import re
import unicodedata

import numpy as np

from pkm.text.vocab import CONTINUES, Vocab

SPACES = re.compile(r"[ \t\r\n]+")


def canonical(piece: str) -> str:
    """A piece without case, accents and forms that look alike (NFKC, NFD), spaces around it, or the mark that its word goes on.

    A piece of spaces alone is one space, and one that is no text (U+FFFD, undecodable bytes) is itself.
    """
    if "\ufffd" in piece or any("\ud800" <= character <= "\udfff" for character in piece):
        return piece
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", piece.removesuffix(CONTINUES)))
    text = "".join(character for character in text if unicodedata.category(character) != "Mn").lower()
    text = SPACES.sub(" ", text)
    return text.strip() or (" " if text else piece)


def canonical_ids(vocab: Vocab) -> np.ndarray:
    """(V,) int64: of each id the number of its canonical piece, in order of first appearance; specials are themselves."""
    numbers: dict[tuple[bool, str], int] = {}
    found = []
    for i, piece in enumerate(vocab.pieces):
        special = i < vocab.first
        found.append(numbers.setdefault((special, piece if special else canonical(piece)), len(numbers)))
    return np.array(found, np.int64)
