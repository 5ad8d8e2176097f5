"""Articles out of a column of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pkm.errors import UserError
from pkm.prepare.input.compression import HEAD_BYTES, compression_of
from pkm.prepare.input.foreign import foreign
from pkm.prepare.input.records import Found, Skipped, decoded, too_large
from pkm.prepare.input.sources import Piece
from pkm.prepare.input.streams import open_raw

ROWS = 64
# Text never packs this well; a row group that does would fill memory with nothing.
BOMB_RATIO, BOMB_BYTES = 200, 1 << 28
NAMED = 30
"""Columns that a message names."""


def read_parquet(piece: Piece, limit: int) -> Iterator[Found]:
    """The articles of the row groups of a piece: one a row, empty where the column holds null."""
    import pyarrow
    import pyarrow.parquet

    file = piece.file
    with open_raw(file.url) as raw:
        try:
            table = pyarrow.parquet.ParquetFile(raw, page_checksum_verification=True)
            names = list(table.schema_arrow.names)
        except _broken() as error:
            raw.seek(0)
            yield Skipped("damaged", file.url, _why_not_parquet(raw.read(HEAD_BYTES), error, file.url), lost=file.size)
            return
        check_column(names, file.column, file.url)
        stop = table.num_row_groups if piece.stop is None else piece.stop
        for group in range(piece.start, stop):
            yield from _row_group(table, group, file.column, file.url, limit)


def _row_group(table: Any, group: int, column: str, url: str, limit: int) -> Iterator[Found]:
    where = f"{url}, row group {group}"
    rows = table.metadata.row_group(group)
    packed = unpacked = read = 0
    try:
        for chunk in map(rows.column, range(rows.num_columns)):
            if chunk.path_in_schema == column or chunk.path_in_schema.startswith(f"{column}."):
                packed, unpacked = packed + chunk.total_compressed_size, unpacked + chunk.total_uncompressed_size
        if unpacked > BOMB_BYTES and unpacked > BOMB_RATIO * max(packed, 1):
            why = f"{packed} bytes that unpack to {unpacked}"
            yield Skipped("too_large", where, why, records=rows.num_rows)
            return
        for batch in table.iter_batches(batch_size=ROWS, row_groups=[group], columns=[column]):
            # Of columns `text` and `text.en`, asking for the first gives both.
            for value in _bytes(batch.column(batch.schema.names.index(column)), column, url):
                row = f"{where}, row {read}"
                read += 1
                if value is None:
                    yield ""
                else:
                    yield decoded(value, row) if len(value) <= limit else too_large(row, limit)
    except _broken() as error:
        left = max(1, rows.num_rows - read)
        lost = packed * left // max(rows.num_rows, 1)
        yield Skipped("damaged", f"{where}, row {read}", _first_line(error), lost, records=left)


def _bytes(values: Any, column: str, url: str) -> Iterator[bytes | None]:
    """Values of a column of texts as they are stored: whether each is UTF-8 is for whoever takes it.

    A column of any type may hold nothing but nulls, as the parts of a data set do in which nobody had a text.
    """
    import pyarrow
    import pyarrow.types as types

    while isinstance(values, pyarrow.ExtensionArray):
        values = values.storage
    if isinstance(values, pyarrow.DictionaryArray):
        values = values.dictionary_decode()
    kind, all_null = values.type, values.null_count == len(values)
    if types.is_string(kind):
        values = values.view(pyarrow.binary())
    elif types.is_large_string(kind):
        values = values.view(pyarrow.large_binary())
    elif types.is_string_view(kind):
        values = values.view(pyarrow.binary_view())
    elif not (types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind) or all_null):
        raise UserError(f"the column {column!r} holds {kind}, not text", url, "name another with `column:`")
    return (value.as_py() for value in values)


def check_column(names: list[str], column: str, url: str) -> None:
    if names.count(column) > 1:
        what = f"{names.count(column)} of its columns are called {column!r}"
        raise UserError(what, url, "write it again with one of them under a name of its own, or leave it out")
    if column not in names:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        what = f"it has no column {column!r}; its columns are {', '.join(names[:NAMED])}{more}"
        raise UserError(what, url, "name one with `column:`")


def _broken() -> tuple[type[Exception], ...]:
    """What pyarrow raises for files that are not as they should be."""
    import pyarrow

    return (pyarrow.ArrowException, OSError, ValueError, KeyError)


def _why_not_parquet(head: bytes, error: Exception, url: str) -> str:
    if kind := compression_of(head):
        return f"not Parquet but compressed with {kind}: unpack it (Parquet is compressed within)"
    other = None if head.startswith(b"PAR1") else foreign(head, url)
    return f"not Parquet: {other or _first_line(error)}"


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        # Not what the file holds but the disk or the network.
        raise error
    return str(error).splitlines()[0] if str(error) else type(error).__name__
