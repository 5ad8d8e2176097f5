"""Records out of pieces of files: plain text and JSON lines here, Parquet in parquet.py, web archives in warc.py."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pkm.prepare.input.compression import BLOCK
from pkm.prepare.input.json_values import OneALine
from pkm.prepare.input.parquet import read_parquet
from pkm.prepare.input.records import Damaged, Found, Skipped, article, decoded, too_large
from pkm.prepare.input.sources import Piece
from pkm.prepare.input.streams import line_start, lines, open_raw, open_text, open_unpacked
from pkm.prepare.input.warc import read_warc

BOM = b"\xef\xbb\xbf"


def read_piece(piece: Piece, limit: int) -> Iterator[Found]:
    """The records that begin in a piece, in order; none is held in memory beyond `limit` bytes.

    UserError where the file cannot be opened, or lacks the column asked for.
    """
    file = piece.file
    if file.format == "parquet":
        yield from read_parquet(piece, limit)
    elif file.format == "warc":
        yield from read_warc(piece, limit)
    elif file.format == "text" and file.documents == "file":
        yield from _whole_file(piece, limit)
    elif file.format == "text" and file.documents == "blank":
        yield from _paragraphs(piece, limit)
    else:
        for inside, where, line in _lines(piece, limit):
            if not inside:
                return
            if isinstance(line, Skipped):
                yield line
            elif line.strip():
                yield _json(line, file.column, where) if file.format == "jsonl" else decoded(line, where)


def _whole_file(piece: Piece, limit: int) -> Iterator[Found]:
    raw, stream = open_text(piece.file.url, "text")
    with raw:
        data = bytearray()
        try:
            while len(data) <= limit and (block := stream.read(1 << 20)):
                data += block
        except Damaged as error:
            yield Skipped("damaged", piece.file.url, str(error), lost=piece.file.size)
            return
    yield too_large(piece.file.url, limit) if len(data) > limit else decoded(bytes(data), piece.file.url)


def _lines(piece: Piece, limit: int) -> Iterator[tuple[bool, str, bytes | Skipped]]:
    """(whether it begins in the piece, where, line) of every line from the first that does, to the file's end.

    Skipped in place of a line that cannot be read.
    """
    url, file_format = piece.file.url, piece.file.format
    raw, stream = open_unpacked(piece.chunk) if piece.chunk else open_text(url, file_format)
    with raw:
        start, stop = piece.start, piece.stop
        if stream is raw:
            start = line_start(raw, start)
            raw.seek(start)
        elif not piece.chunk and start:
            # What can only be read from its start is read whole by the reader of its first piece.
            return
        else:
            stop = None
        offset, records = start, 0
        try:
            for number, (offset, line) in enumerate(lines(stream, limit, start), 1):
                where = f"{url}:{number}" if start == 0 else f"{url}, byte {offset}"
                if isinstance(stream, OneALine):
                    records += line is None or bool(line.strip())
                    where = f"{url}, object {records}"
                if line is not None:
                    # Files put one after the other have marks within.
                    line = line.removeprefix(BOM)
                yield stop is None or offset < stop, where, too_large(where, limit) if line is None else line
        except Damaged as error:
            lost = 0 if piece.chunk else max(0, piece.file.size - stream.tell())
            yield True, url, Skipped("damaged", f"{url}, byte {offset}", str(error), lost)


def _json(line: bytes, column: str, where: str) -> Found:
    text = decoded(line, where)
    if isinstance(text, Skipped):
        return text
    try:
        # Whole numbers are of no use here, and Python refuses those of more than 4,300 digits.
        record = json.loads(text, parse_int=float)
    except (ValueError, RecursionError) as error:
        return Skipped("damaged", where, f"not JSON: {error}")
    if not isinstance(record, dict) or column not in record:
        fields = f"its fields are {', '.join(list(record)[:8])}" if isinstance(record, dict) else "no object"
        return Skipped("damaged", where, f"no field {column!r}: {fields}")
    value = record[column]
    if value is not None and not isinstance(value, str):
        return Skipped("damaged", where, f"the field {column!r} holds no text")
    return article(value or "", where)


def _paragraphs(piece: Piece, limit: int) -> Iterator[Found]:
    """Documents between blank lines. One belongs to the piece in which its first line begins; one that breaks off is none."""
    elsewhere = bool(piece.start) and not piece.chunk and not _follows_blank_line(piece)
    document: list[bytes] = []
    size, begin = 0, ""
    for inside, where, line in _lines(piece, limit):
        broken = isinstance(line, Skipped) and line.kind == "damaged"
        if broken or line == b"" or (isinstance(line, bytes) and not line.strip()):
            if size and not broken:
                yield _joined(document, size, begin, limit)
            document, size, elsewhere = [], 0, False
            if isinstance(line, Skipped):
                yield line
            continue
        if not size and not inside:
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
