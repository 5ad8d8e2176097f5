"""Text that is tokenised already: ids of documents out of Parquet and the .bin files of nanoGPT, llm.c and Megatron.

    parquet-ids    a list of integers a row
    nanogpt        uint16 after uint16, little-endian; the end's id between documents (its data/*/prepare.py)
    llm.c          the same behind a header of 256 int32: magic, version, number of ids (its dev/data/data_common.py);
                   of Llama 3's vocabulary uint32
    megatron       see megatron.py

Nothing is passed over: a file that is not what it should be ends the preparation, with the place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from pkm.errors import UserError
from pkm.prepare.input import megatron
from pkm.prepare.input.parquet import check_column
from pkm.prepare.input.sources import Input, Piece
from pkm.prepare.input.streams import exactly, open_raw

HEADER_BYTES = 1024
LLM_C: dict[tuple[int, int], np.dtype] = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
"""(magic, version) -> type of an id: GPT-2's vocabulary, Llama 3's."""

NANOGPT = np.dtype("<u2")
AT_ONCE = 1 << 20
"""Ids that are looked through at a time."""


@dataclass(frozen=True)
class Document:
    """ids (n,) of any integer type, without the end's; where it stands."""

    ids: np.ndarray
    where: str


def read_ids(piece: Piece, size: int, end_id: int, limit: int) -> Iterator[Document]:
    """The documents that begin in a piece, those without ids left out. Ids go from 0 to size - 1; end_id ends a document.

    UserError, with file and offset, for anything that is not as the format says, for an id beyond the vocabulary, and for a
    document of more than `limit` ids.
    """
    readers = {"parquet-ids": _parquet, "megatron": _megatron, "nanogpt": _stream, "llm.c": _stream}
    for document in readers[piece.file.format](piece, end_id, limit):
        _check_length(len(document.ids), limit, document.where, end_id)
        ids = _without_ends(document.ids, end_id)
        wrong = np.flatnonzero((ids < 0) | (ids >= size))
        if len(wrong):
            what = f"the id {ids[wrong[0]]} is none of a vocabulary of {size} (0 to {size - 1})"
            fix = "give the tokenizer, or the vocab_size, that the ids were made with"
            raise UserError(what, f"{document.where}, id {wrong[0]} of its document", fix)
        if len(ids):
            yield Document(ids, document.where)


def _check_length(ids: int, limit: int, where: str, end_id: int) -> None:
    if ids > limit:
        fix = f"see that {end_id} is the id between documents (subwords.end_id, subwords.end), or raise limits.document_megabytes"
        raise UserError(f"a document has more than {limit} ids", where, fix)


def _without_ends(ids: np.ndarray, end_id: int) -> np.ndarray:
    """Without the end's id in front and behind: one is put behind every document later."""
    inner = np.flatnonzero(ids != end_id)
    return ids[inner[0] : inner[-1] + 1] if len(inner) else ids[:0]


def _stream(piece: Piece, end_id: int, limit: int) -> Iterator[Document]:
    """Documents of a file of ids with the end's between them; one belongs to the piece that its first id is in."""
    file = piece.file
    with open_raw(file.url) as raw:
        first, kind = llm_c_header(raw, file) if file.format == "llm.c" else _no_header(raw, file)
        width = kind.itemsize
        position = max(first, piece.start + (first - piece.start) % width)
        stop = file.size if piece.stop is None else piece.stop
        elsewhere = position > first and _at(raw, position - width, kind) != end_id
        parts: list[np.ndarray] = []
        begin = position
        while position < file.size and (position < stop or parts):
            block = np.frombuffer(exactly(raw, min(AT_ONCE * width, file.size - position), file.url, position), kind)
            offset = 0
            for end in (*np.flatnonzero(block == end_id).tolist(), len(block)):
                if end > offset and not elsewhere:
                    if not parts:
                        begin = position + offset * width
                        if begin >= stop:
                            return
                    parts.append(block[offset:end])
                    _check_length(sum(map(len, parts)), limit, f"{file.url}, byte {begin}", end_id)
                if end < len(block):
                    if parts:
                        yield Document(np.concatenate(parts), f"{file.url}, byte {begin}")
                    parts, elsewhere = [], False
                offset = end + 1
                if not parts and position + offset * width >= stop:
                    return
            position += len(block) * width
        if parts:
            yield Document(np.concatenate(parts), f"{file.url}, byte {begin}")


def _at(raw: BinaryIO, position: int, kind: np.dtype) -> int:
    raw.seek(position)
    return int(np.frombuffer(raw.read(kind.itemsize), kind)[0])


def _no_header(raw: BinaryIO, file: Input) -> tuple[int, np.dtype]:
    """(0, type of an id) of a file of bare ids."""
    raw.seek(0)
    head = raw.read(8)
    if len(head) == 8 and tuple(np.frombuffer(head, "<i4").tolist()) in LLM_C:
        raise UserError("it begins with llm.c's header", f"{file.url}, byte 0", "give `format: llm.c`")
    if file.size % NANOGPT.itemsize:
        what = f"its {file.size} bytes are no whole number of ids of 2 bytes each: it ends within one"
        raise UserError(what, f"{file.url}, byte {file.size - 1}", "copy the file again, or give another format")
    return 0, NANOGPT


def llm_c_header(raw: BinaryIO, file: Input) -> tuple[int, np.dtype]:
    """(where ids begin, their type). UserError for another magic, version or length than the header's."""
    header = np.frombuffer(exactly(raw, HEADER_BYTES, file.url, 0), "<i4")
    magic, version, count = (int(number) for number in header[:3])
    kind = LLM_C.get((magic, version))
    if kind is None:
        known = ", ".join(f"{m} version {v}" for m, v in LLM_C)
        what = f"its header has magic {magic}, version {version}; known are {known}"
        raise UserError(what, f"{file.url}, byte 0", "give `format: nanogpt` for ids without a header")
    if file.size != HEADER_BYTES + count * kind.itemsize:
        what = (
            f"its header says {count} ids, which end at byte {HEADER_BYTES + count * kind.itemsize}; it has {file.size}"
        )
        raise UserError(what, f"{file.url}, byte {file.size}", "copy the file again")
    return HEADER_BYTES, kind


def _megatron(piece: Piece, end_id: int, limit: int) -> Iterator[Document]:
    """Documents of a .bin by their numbers."""
    for number, ids in megatron.documents(piece.file.url, piece.file.size, piece.start, piece.stop):
        yield Document(ids, f"{piece.file.url}, document {number}")


def _parquet(piece: Piece, end_id: int, limit: int) -> Iterator[Document]:
    """One document a row of the column."""
    import pyarrow
    import pyarrow.parquet

    file = piece.file
    group = 0
    with open_raw(file.url) as raw:
        try:
            table = pyarrow.parquet.ParquetFile(raw, page_checksum_verification=True)
            check_column(list(table.schema_arrow.names), file.column, file.url)
            kind = table.schema_arrow.field(file.column).type
            lists = (
                pyarrow.types.is_list(kind)
                or pyarrow.types.is_large_list(kind)
                or pyarrow.types.is_fixed_size_list(kind)
            )
            if not lists or not pyarrow.types.is_integer(kind.value_type):
                what = f"the column {file.column!r} holds {kind}, not lists of integers"
                raise UserError(what, file.url, "name another with `column:`, or give `format: parquet` for text")
            for group in range(piece.start, table.num_row_groups if piece.stop is None else piece.stop):
                row = 0
                for batch in table.iter_batches(batch_size=64, row_groups=[group], columns=[file.column]):
                    for value in batch.column(0):
                        where = f"{file.url}, row group {group}, row {row}"
                        yield Document(_row(value, where), where)
                        row += 1
        except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            what = f"it cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            raise UserError(what, f"{file.url}, row group {group}", "copy the file again, or write it anew") from error


def _row(value: Any, where: str) -> np.ndarray:
    if not value.is_valid:
        return np.empty(0, np.int64)
    if value.values.null_count:
        raise UserError("a list of ids has a null in it", where, "write it anew without")
    return value.values.to_numpy(zero_copy_only=False)
