"""Short ways to read a file as a preparation does."""

from __future__ import annotations

from pathlib import Path

from pkm.prepare.input.readers import read_piece
from pkm.prepare.input.records import Skipped
from pkm.prepare.input.sources import Input, Piece, list_inputs, pieces_of
from pkm.prepare.settings import PrepareConfig

LIMIT = 1000


def inputs(path: str, **source) -> list[Input]:
    return list_inputs(PrepareConfig.model_validate({"name": "x", "sources": [{"path": path, **source}]}))


def read(path: Path | str, target: int | None = None, limit: int = LIMIT, **source) -> list:
    """Texts, and (kind, why) of what was skipped, of all pieces of a file one after the other."""
    found = []
    for file in inputs(str(path), **source):
        for piece in pieces_of(file, target) if target else [Piece(file)]:
            found += read_piece(piece, limit)
    return [(record.kind, record.why) if isinstance(record, Skipped) else record for record in found]
