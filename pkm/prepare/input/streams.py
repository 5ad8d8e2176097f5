"""Bytes out of files, local or remote, compressed or not, never more in memory than asked for."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

import fsspec

from pkm.errors import UserError
from pkm.files import refusal
from pkm.prepare.input.compression import BLOCK, HEAD_BYTES, Unpacked, compression_of
from pkm.prepare.input.encodings import Recoded, marked_encoding
from pkm.prepare.input.foreign import Refused, foreign
from pkm.prepare.input.json_values import OneALine, holds_values
from pkm.prepare.input.records import Damaged

# What is looked at to tell what kind of text a file holds.
HEAD_TEXT = 1 << 12


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path on it. UserError for a protocol that is not installed."""
    try:
        return fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UserError(str(error), url, "install the package that fsspec names, or copy the files here") from error


def open_raw(url: str) -> BinaryIO:
    """The file as it is. UserError where it is not there or may not be read."""
    try:
        fs, path = filesystem(url)
        raw = fs.open(path, "rb")
    except OSError as error:
        raise refusal(error, url) from error
    # Some file systems (zip) close their files when they are themselves collected.
    raw.filesystem = fs
    return raw


def exactly(raw: BinaryIO, count: int, url: str, position: int) -> bytes:
    """So many bytes from a position on. UserError, with the place, where the file ends before."""
    end = raw.seek(0, 2)  # before anything is read: a damaged count may ask for more than memory holds
    if position + count > end:
        raise UserError(
            f"it ends here, {position + count - end} bytes early", f"{url}, byte {end}", "copy the file again"
        )
    raw.seek(position)
    return raw.read(count)


def open_unpacked(url: str) -> tuple[BinaryIO, Any]:
    """(the file as it is, the bytes in it): the second is the first where the file is not compressed."""
    raw = open_raw(url)
    kind = compression_of(raw.read(HEAD_BYTES))
    raw.seek(0)
    return raw, (Unpacked(raw, kind) if kind else raw)


def open_text(url: str, format: str) -> tuple[BinaryIO, Any]:
    """(the file as it is, its text in UTF-8), for JSON an object a line: the second is the first where the file is that.

    Otherwise the second can only be read from its start. It raises Damaged, saying what to do, for a file of another kind.
    """
    raw, stream = open_unpacked(url)
    head = _peek(stream)
    if what := foreign(head, url):
        return raw, Refused(what)
    if encoding := marked_encoding(head):
        stream = Recoded(stream, encoding)
        head = stream.peek(HEAD_TEXT)
    if format == "jsonl" and holds_values(head):
        stream = OneALine(stream)
    return raw, stream


def _peek(stream: Any) -> bytes:
    if isinstance(stream, Unpacked):
        return stream.peek(HEAD_TEXT)
    head = stream.read(HEAD_TEXT)
    stream.seek(0)
    return head


def lines(stream: Any, limit: int, offset: int = 0) -> Iterator[tuple[int, bytes | None]]:
    """(offset, line without its newline), in bytes; None in place of a line longer than `limit`, which is not kept.

    Only b"\\n" ends a line. A last line without one counts; nothing after a last newline does not.
    """
    start, kept = offset, bytearray()
    too_long = False
    while block := stream.read(1 << 20):
        position = 0
        while (end := block.find(b"\n", position)) >= 0:
            if not too_long and len(kept) + end - position <= limit:
                yield start, bytes(kept) + block[position:end] if kept else block[position:end]
            else:
                yield start, None
            offset += end + 1 - position
            position, start = end + 1, offset
            kept.clear()
            too_long = False
        offset += len(block) - position
        if len(kept) + len(block) - position > limit:
            too_long = True
            kept.clear()
        if not too_long:
            kept += block[position:]
    if too_long or offset > start:
        yield start, None if too_long else bytes(kept)


def line_runs(stream: Any, limit: int, block_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """(offset, whole lines with their newlines), many at a time; None in place of a line longer than `limit`.

    Lines that lie within one block are not looked at, so only those longer than a block are sure to be passed over.
    """
    start, offset, kept = 0, 0, b""
    too_long = False
    while block := stream.read(block_bytes):
        first, end = block.find(b"\n") + 1, block.rfind(b"\n") + 1
        if end == 0:
            kept = b"" if too_long else kept + block
        else:
            too_long = too_long or len(kept) + first - 1 > limit
            if too_long:
                yield start, None
                start, run = offset + first, block[first:end]
            else:
                run = kept + block[:end]
            if run:
                yield start, run
            start, kept = offset + end, block[end:]
            too_long = False
        offset += len(block)
        if len(kept) > limit:
            too_long, kept = True, b""
    if too_long:
        yield start, None
    elif kept:
        yield start, kept + b"\n"


def line_start(raw: BinaryIO, position: int) -> int:
    """Where the first line that begins at or after `position` begins (or the end of the file)."""
    if position == 0:
        return 0
    raw.seek(position - 1)
    while block := raw.read(BLOCK):
        if (end := block.find(b"\n")) >= 0:
            return raw.tell() - len(block) + end + 1
    return raw.tell()


def bounded(data: bytes, encoding: Literal["gzip", "deflate"], limit: int) -> bytes:
    """Unpack the body of an HTTP response. Raises Damaged where it is broken, OverflowError beyond `limit` bytes."""
    if encoding == "gzip":
        stream = Unpacked(io.BytesIO(data), "gz")
        output = bytearray()
        while len(output) <= limit and (piece := stream.read(1 << 20)):
            output += piece
    else:
        try:
            # "deflate" is zlib by the standard, a bare deflate stream from some servers.
            output = bytearray(zlib.decompressobj(15 if data[:1] == b"\x78" else -15).decompress(data, limit + 1))
        except zlib.error as error:
            raise Damaged(f"broken deflate body: {error}") from error
    if len(output) > limit:
        raise OverflowError
    return bytes(output)
