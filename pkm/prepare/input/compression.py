"""Compressed files: gzip (RFC 1952), Zstandard (RFC 8878), xz, bzip2, of any number of members, frames or streams."""

from __future__ import annotations

import bz2
import io
import lzma
import re
import struct
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Literal

import zstandard

from pkm.prepare.input.buffered import Buffered
from pkm.prepare.input.records import Damaged

Compression = Literal["gz", "zst", "xz", "bz2"]
ENDINGS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".xz": "xz", ".bz2": "bz2"}
# zst: a frame, or one to be skipped, which is where what pzstd writes begins. bz2: a block, or the end of none.
HEADS: dict[Compression, re.Pattern[bytes]] = {
    "gz": re.compile(rb"\x1f\x8b"),
    "zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
}
HEAD_BYTES = 10
# How zlib and zstd say so.
CHECKSUM = re.compile("incorrect (data|length) check|checksum")
BLOCK = 1 << 16
# Window (zst) and dictionary (xz) a file may ask for: what `zstd --ultra -22` and `xz -9` need.
WINDOW_BYTES = 1 << 27
# zstd's decompressor takes no bound on its output: a block of 128 KiB may come from 4 bytes, so it is fed in small bites.
ZST_BITE = 1 << 10
# A web archive's dictionary is in its first frame, one to be skipped of this kind, perhaps compressed itself.
DICTIONARY_FRAME, DICTIONARY_HEAD, DICTIONARY_BYTES = b"\x5d\x2a\x4d\x18", b"\x37\xa4\x30\xec", 1 << 24


def compression_of(head: bytes) -> Compression | None:
    """What the first HEAD_BYTES of a file say it is compressed with."""
    return next((kind for kind, pattern in HEADS.items() if pattern.match(head)), None)


BROKEN = (zlib.error, lzma.LZMAError, zstandard.ZstdError, MemoryError, EOFError, OSError)
"""What decompressors raise for data that is not theirs."""


class Mismatch(Damaged):
    """What was unpacked is not what was packed: its checksum differs, though nothing before it could tell."""


class _Member:
    """The decompressor of one gzip member, zst frame, xz or bz2 stream, all behind one call. zst: makes those of frames."""

    def __init__(self, kind: Compression, zst: zstandard.ZstdDecompressor | None):
        self._kind = kind
        self._object: Any
        if kind == "gz":
            self._object = zlib.decompressobj(31)
        elif kind == "xz":
            self._object = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=2 * WINDOW_BYTES)
        elif kind == "bz2":
            self._object = bz2.BZ2Decompressor()
        else:
            assert zst is not None
            self._object = zst.decompressobj()

    @property
    def hungry(self) -> bool:
        """Whether it has nothing to give without more input."""
        return self._kind in ("gz", "zst") or self._object.needs_input

    @property
    def done(self) -> bool:
        return self._object.eof

    def take(self, data: bytes, size: int) -> tuple[bytes, bytes]:
        """(output, input that was not used); the output has at most `size` bytes (zst: at most 32 MiB)."""
        if self._kind == "zst":
            output, left = self._object.decompress(data[:ZST_BITE]), data[ZST_BITE:]
        else:
            output = self._object.decompress(data, size)
            # At a member's end zlib has what follows in both.
            left = self._object.unconsumed_tail if self._kind == "gz" and not self.done else b""
        return output, (self._object.unused_data + left if self.done else left)


class Unpacked(Buffered):
    """What a compressed stream unpacks to, all of it that comes before damage.

    Concatenated members and frames are one stream, unless goes_on(where a member ended in `raw`), asked when more is
    wanted, says otherwise.
    """

    def __init__(self, raw: BinaryIO, kind: Compression, goes_on: Callable[[int], bool] = lambda end: True):
        super().__init__()
        self._raw, self._kind, self._goes_on = raw, kind, goes_on
        self._zst: zstandard.ZstdDecompressor | None = None
        self._member: _Member | None = None
        self._input = b""
        self._begin = self._unpacked = raw.tell()
        """Where the member begins, and up to where in the file everything was given."""
        self._given = 0
        """Bytes of the member that were given."""

    def tell(self) -> int:
        return self._unpacked

    def _more(self, size: int) -> bytes:
        if self._member is None and self._unpacked > self._begin and not self._is_one_stream():
            self._ended = True
            return b""
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
        first = self._kind == "zst" and self._zst is None
        dictionary = self._dictionary() if first else b""
        try:
            if first:
                words = zstandard.ZstdCompressionDict(dictionary) if dictionary else None
                self._zst = zstandard.ZstdDecompressor(dict_data=words, max_window_size=WINDOW_BYTES)
            if self._member is None:
                self._member, self._begin, self._given = self._new(), self._raw.tell() - len(self._input), 0
            output, self._input = self._member.take(self._input, size)
        except BROKEN as error:
            kind_of_damage = Mismatch if CHECKSUM.search(str(error)) else Damaged
            self._broken = kind_of_damage(f"broken {self._kind} data: {error}")
            self._broken.__cause__ = error
            if self._member is not None and (output := self._up_to_damage(size)):
                return output
            raise self._broken from error
        self._given += len(output)
        if output or self._member.done:
            self._unpacked = self._raw.tell() - len(self._input)
        if self._member.done:
            self._member = None
        elif starved and not output:
            raise Damaged(f"the file ends in the middle of its {self._kind} data")
        return output

    def _is_one_stream(self) -> bool:
        position = self._raw.tell()
        answer = self._goes_on(self._unpacked)
        self._raw.seek(position)
        return answer

    def _new(self) -> _Member:
        return _Member(self._kind, self._zst)

    def _up_to_damage(self, size: int) -> bytes:
        """At most `size` bytes that a member still holds before the place where it cannot be read.

        A decompressor that meets damage gives nothing of the call in which it does, so it is fed once more, in the end
        byte by byte.
        """
        end, member, skip, output = self._raw.tell(), self._new(), self._given, bytearray()
        self._raw.seek(self._begin)
        try:
            while len(output) < size and (fed := self._raw.read(BLOCK if self._raw.tell() < end - 2 * BLOCK else 1)):
                while fed or not member.hungry:
                    piece, fed = member.take(fed, size)
                    output += piece[skip:]
                    skip = max(0, skip - len(piece))
                    self._unpacked = self._raw.tell() - len(fed)
        except BROKEN:
            pass
        return bytes(output)

    def _dictionary(self) -> bytes:
        """What a web archive may begin with (IIPC, "Use of Zstandard compression in WARC files"); b"" if it does not."""
        if self._input[:4] != DICTIONARY_FRAME or len(self._input) < 8:
            return b""
        end = 8 + min(struct.unpack("<I", self._input[4:8])[0], DICTIONARY_BYTES)
        if len(self._input) < end:
            self._input += self._raw.read(end - len(self._input))
        content = self._input[8:end]
        if HEADS["zst"].match(content):
            content = Unpacked(io.BytesIO(content), "zst").peek(DICTIONARY_BYTES)
        return content if content[:4] == DICTIONARY_HEAD else b""
