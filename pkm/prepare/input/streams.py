"""Bytes out of files, local or remote, compressed or not, never more in memory than asked for."""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

import fsspec
import zstandard

from pkm.errors import UserError
from pkm.files import refusal

Compression = Literal["gz", "zst", "xz"]
MAGIC: dict[bytes, Compression] = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst", b"\xfd7zXZ\x00": "xz"}
ENDINGS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".xz": "xz"}
BLOCK = 1 << 16
# Window (zst) and dictionary (xz) a file may ask for: what `zstd --ultra -22` and `xz -9` need.
WINDOW_BYTES = 1 << 27
# zstd's decompressor takes no bound on its output: a block of 128 KiB may come from 4 bytes, so it is fed in small bites.
ZST_BITE = 1 << 10


class Damaged(Exception):
    """A file or record that cannot be read; the message says why."""


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


def compression_of(head: bytes) -> Compression | None:
    """What the first bytes of a file say it is compressed with."""
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None)


class _Member:
    """The decompressor of one gzip member, zst frame or xz stream, all three behind one call."""

    def __init__(self, kind: Compression):
        self._kind = kind
        self._object: Any
        if kind == "gz":
            self._object = zlib.decompressobj(31)
        elif kind == "xz":
            self._object = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=2 * WINDOW_BYTES)
        else:
            self._object = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).decompressobj()

    @property
    def hungry(self) -> bool:
        """Whether it has nothing to give without more input."""
        return self._kind != "xz" or self._object.needs_input

    @property
    def done(self) -> bool:
        return self._object.eof

    def take(self, data: bytes, size: int) -> tuple[bytes, bytes]:
        """(output, input that was not used); the output has at most `size` bytes (zst: at most 32 MiB)."""
        if self._kind == "zst":
            output, left = self._object.decompress(data[:ZST_BITE]), data[ZST_BITE:]
        else:
            output = self._object.decompress(data, size)
            left = self._object.unconsumed_tail if self._kind == "gz" else b""
        return output, (self._object.unused_data + left if self.done else left)


class Unpacked:
    """Reads a compressed stream in pieces of bounded size. Concatenated members and frames are one stream.

    `read(n)` returns at most n bytes, b"" at the end. Raises Damaged where the data is broken or ends too early.
    """

    def __init__(self, raw: BinaryIO, kind: Compression):
        self._raw, self._kind = raw, kind
        self._member: _Member | None = None
        self._input = b""
        self._output = memoryview(b"")
        self._ended = False

    def tell(self) -> int:
        """Up to where in the compressed file everything was unpacked."""
        return self._raw.tell() - len(self._input)

    def read(self, size: int) -> bytes:
        while not self._output and not self._ended:
            self._output = memoryview(self._more(size))
        piece, self._output = self._output[:size], self._output[size:]
        return bytes(piece)

    def _more(self, size: int) -> bytes:
        """The next output; b"" also where input had to be skipped first."""
        starved = False
        if not self._input and (self._member is None or self._member.hungry):
            self._input = self._raw.read(BLOCK)
            starved = not self._input
        if self._member is None:
            # Between members: the file may end here, and zeros may pad it.
            self._input = self._input.lstrip(b"\0")
            self._ended = starved
            if not self._input:
                return b""
            self._member = _Member(self._kind)
        try:
            output, self._input = self._member.take(self._input, size)
        except (zlib.error, lzma.LZMAError, zstandard.ZstdError, MemoryError) as error:
            raise Damaged(f"broken {self._kind} data: {error}") from error
        if self._member.done:
            self._member = None
        elif starved and not output:
            raise Damaged(f"the file ends in the middle of its {self._kind} data")
        return output


def open_unpacked(url: str) -> tuple[BinaryIO, Any]:
    """(the file as it is, the bytes in it): the second is the first where the file is not compressed."""
    raw = open_raw(url)
    kind = compression_of(raw.read(6))
    raw.seek(0)
    return raw, (Unpacked(raw, kind) if kind else raw)


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
