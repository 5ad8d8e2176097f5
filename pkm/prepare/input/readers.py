"""Records out of pieces of files: plain text, JSON lines, Parquet. (Web archives: warc.py.)"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pkm.errors import UserError
from pkm.prepare.input.records import Found, Skipped, decoded, too_large
from pkm.prepare.input.sources import Piece
from pkm.prepare.input.streams import BLOCK, Damaged, line_start, lines, open_raw, open_unpacked
from pkm.prepare.input.warc import read_warc

BOM = b"\xef\xbb\xbf"
ROWS = 64
# Text never packs this well; a row group that does would fill memory with nothing.
BOMB_RATIO, BOMB_BYTES = 200, 1 << 28


def read_piece(piece: Piece, limit: int) -> Iterator[Found]:
    """The records that begin in a piece, in order; none is held in memory beyond `limit` bytes.

    UserError where the file cannot be opened, or lacks the column asked for.
    """
    file = piece.file
    if file.format == "parquet":
        yield from _parquet(piece, limit)
    elif file.format == "warc":
        yield from read_warc(piece, limit)
    elif file.format == "text" and file.documents == "file":
        yield from _whole_file(piece, limit)
    elif file.format == "text" and file.documents == "blank":
        yield from _paragraphs(piece, limit)
    else:
        for _, where, line in _lines(piece, limit):
            if isinstance(line, Skipped):
                yield line
            elif line.strip():
                yield _json(line, file.column, where) if file.format == "jsonl" else decoded(line, where)


def _whole_file(piece: Piece, limit: int) -> Iterator[Found]:
    raw, stream = open_unpacked(piece.file.url)
    with raw:
        data = bytearray()
        try:
            while len(data) <= limit and (block := stream.read(1 << 20)):
                data += block
        except Damaged as error:
            yield Skipped("damaged", piece.file.url, str(error), lost=piece.file.size)
            return
    if len(data) > limit:
        yield too_large(piece.file.url, limit)
    else:
        yield decoded(bytes(data).removeprefix(BOM), piece.file.url)


def _lines(piece: Piece, limit: int) -> Iterator[tuple[int, str, bytes | Skipped]]:
    """(offset, where, line) of every line that begins in the piece; Skipped in place of a line that cannot be read."""
    url = piece.file.url
    raw, stream = open_unpacked(piece.chunk or url)
    with raw:
        start, stop = piece.start, piece.stop
        if stream is raw:
            start = line_start(raw, start)
            raw.seek(start)
        elif not piece.chunk and start:
            # A compressed file without a compressed file's name: the reader of its first piece reads all of it.
            return
        else:
            stop = None
        offset = start
        try:
            for number, (offset, line) in enumerate(lines(stream, limit, start), 1):
                if stop is not None and offset >= stop:
                    return
                where = f"{url}:{number}" if start == 0 else f"{url}, byte {offset}"
                if offset == 0 and line is not None:
                    line = line.removeprefix(BOM)
                yield offset, where, too_large(where, limit) if line is None else line
        except Damaged as error:
            lost = 0 if piece.chunk else max(0, piece.file.size - stream.tell())
            yield offset, url, Skipped("damaged", f"{url}, byte {offset}", str(error), lost)


def _json(line: bytes, column: str, where: str) -> Found:
    text = decoded(line, where)
    if isinstance(text, Skipped):
        return text
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Skipped("damaged", where, f"not JSON: {error}")
    if not isinstance(record, dict) or column not in record:
        fields = f"its fields are {', '.join(map(str, list(record)[:8]))}" if isinstance(record, dict) else "no object"
        return Skipped("damaged", where, f"no field {column!r}: {fields}")
    value = record[column]
    if value is not None and not isinstance(value, str):
        return Skipped("damaged", where, f"the field {column!r} holds no text")
    return value or ""


def _paragraphs(piece: Piece, limit: int) -> Iterator[Found]:
    """Documents between blank lines. One belongs to the piece in which its first line begins."""
    elsewhere = bool(piece.start) and not piece.chunk and not _follows_blank_line(piece)
    stop = None if piece.chunk else piece.stop
    document: list[bytes] = []
    size, begin = 0, ""
    for offset, where, line in _lines(replace(piece, stop=None), limit):
        broken = isinstance(line, Skipped) and line.kind == "damaged"
        if broken or line == b"" or (isinstance(line, bytes) and not line.strip()):
            if size:
                yield _joined(document, size, begin, limit)
            document, size, elsewhere = [], 0, False
            if isinstance(line, Skipped):
                yield line
            continue
        if not size and stop is not None and offset >= stop:
            return
        if not elsewhere:
            begin = begin if size else where
            size += limit + 2 if isinstance(line, Skipped) else len(line) + 1
            if isinstance(line, bytes) and size <= limit:
                document.append(line)
    if size:
        yield _joined(document, size, begin, limit)


def _joined(document: list[bytes], size: int, where: str, limit: int) -> Found:
    return decoded(b"\n".join(document), where) if size <= limit + 1 else too_large(where, limit)


def _parquet(piece: Piece, limit: int) -> Iterator[Found]:
    import pyarrow
    import pyarrow.parquet

    file = piece.file
    with open_raw(file.url) as raw:
        try:
            table = pyarrow.parquet.ParquetFile(raw)
        except (pyarrow.ArrowException, OSError) as error:
            yield Skipped("damaged", file.url, f"not Parquet: {_first_line(error)}", lost=file.size)
            return
        _check_column(table.schema_arrow, file.column, file.url)
        stop = table.num_row_groups if piece.stop is None else piece.stop
        for group in range(piece.start, stop):
            yield from _row_group(table, group, file.column, f"{file.url}, row group {group}", limit)


def _row_group(table: Any, group: int, column: str, where: str, limit: int) -> Iterator[Found]:
    import pyarrow

    rows = table.metadata.row_group(group)
    chunks = [rows.column(i) for i in range(rows.num_columns)]
    packed, unpacked = next(
        (c.total_compressed_size, c.total_uncompressed_size) for c in chunks if c.path_in_schema == column
    )
    if unpacked > BOMB_BYTES and unpacked > BOMB_RATIO * max(packed, 1):
        yield Skipped("too_large", where, f"{packed} bytes that unpack to {unpacked}")
        return
    try:
        for batch in table.iter_batches(batch_size=ROWS, row_groups=[group], columns=[column]):
            for row in range(batch.num_rows):
                value = batch.column(0)[row].as_py()
                if isinstance(value, bytes):
                    yield decoded(value, where) if len(value) <= limit else too_large(where, limit)
                elif value is not None and len(value) > limit // 4 and len(value.encode()) > limit:
                    yield too_large(where, limit)
                else:
                    yield value or ""
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        yield Skipped("damaged", where, _first_line(error), lost=packed)


def _check_column(schema: Any, column: str, url: str) -> None:
    import pyarrow.types as types

    if column not in schema.names:
        raise UserError(
            f"it has no column {column!r}; its columns are {', '.join(schema.names)}", url, "name one with `column:`"
        )
    kind = schema.field(column).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_string_view)
    if not any(is_text(kind) for is_text in texts):
        raise UserError(f"the column {column!r} holds {kind}, not text", url, "name another with `column:`")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _follows_blank_line(piece: Piece) -> bool:
    """Whether the line before the piece's first one is blank."""
    with open_raw(piece.file.url) as raw:
        position = line_start(raw, piece.start) - 1
        before = b""
        while position > 0 and before.strip() == b"" and b"\n" not in before:
            begin = max(0, position - BLOCK)
            raw.seek(begin)
            before = raw.read(position - begin) + before
            position = begin
        return before.rpartition(b"\n")[2].strip() == b""
