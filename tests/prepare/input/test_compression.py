"""pkm/prepare/input/compression.py: all that the formats allow is unpacked, the end is known, and memory stays bounded."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tracemalloc
import zlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.prepare.input.compression import HEAD_BYTES, Unpacked, compression_of
from pkm.prepare.input.records import Damaged

PACK = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.compress, "bz2": bz2.compress}
FEW = settings(max_examples=40, deadline=None)


def unpacked(data: bytes, kind: str, size: int = 1000) -> bytes:
    stream = Unpacked(io.BytesIO(data), kind)
    return b"".join(iter(lambda: stream.read(size), b""))


@pytest.mark.parametrize("kind", PACK)
def test_members_one_after_the_other_and_padding_are_one_stream(kind):
    text = b"".join(b"text %d\n" % i for i in range(20_000))
    # Of less and of more than is asked for at once.
    packed = b"".join(PACK[kind](part) for part in (text[:777], b"", text[777:77_777], text[77_777:]))
    assert compression_of(packed[:HEAD_BYTES]) == kind
    assert unpacked(packed, kind) == text
    assert unpacked(packed + bytes(512), kind) == text


@pytest.mark.parametrize("kind", PACK)
@FEW
@given(share=st.floats(0.001, 0.999))
def test_a_truncated_file_is_never_taken_for_a_whole_one(kind, share):
    packed = PACK[kind](b"".join(b"%d, " % (i * i) for i in range(20_000)))
    with pytest.raises(Damaged, match="ends in the middle"):
        unpacked(packed[: max(1, int(share * len(packed)))], kind)


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("size", [100, 1 << 20])
def test_all_that_comes_before_damage_is_given(kind, size):
    """A decompressor that meets damage says so, and gives nothing of the call in which it did."""
    text = b"".join(b"%d, " % (i * i) for i in range(60_000))
    packed = bz2.compress(text, 1) if kind == "bz2" else PACK[kind](text)
    damaged = packed[:-60] + bytes(60)
    stream = Unpacked(io.BytesIO(damaged), kind)
    given = b""
    with pytest.raises(Damaged, match=r"broken|ends in the middle"):
        while piece := stream.read(size):
            given += piece
    known = {"gz": lambda: zlib.decompressobj(31), "xz": lzma.LZMADecompressor, "bz2": bz2.BZ2Decompressor}
    before = known.get(kind, zstandard.ZstdDecompressor().decompressobj)().decompress(packed[:-60])
    assert len(before) > len(text) // 3 and given.startswith(before)
    assert stream.tell() >= len(packed) - len(packed) // 2 and stream.broken


@pytest.mark.parametrize("kind", PACK)
def test_garbage_after_the_data_is_damage_and_what_came_before_is_given(kind):
    stream = Unpacked(io.BytesIO(PACK[kind](b"text") + b"garbage!"), kind)
    assert stream.read(100) == b"text"
    with pytest.raises(Damaged, match=r"broken|ends in the middle"):
        stream.read(100)


@pytest.mark.parametrize("kind", PACK)
def test_a_bomb_is_read_in_bounded_memory(kind):
    chunk = bytes(1 << 20)
    if kind == "gz":
        packer = zlib.compressobj(9, wbits=31)
    elif kind == "xz":
        packer = lzma.LZMACompressor(preset=0)
    elif kind == "bz2":
        packer = bz2.BZ2Compressor(1)
    else:
        packer = zstandard.ZstdCompressor(level=1).compressobj()
    packed = b"".join([packer.compress(chunk) for _ in range(300)] + [packer.flush()])
    tracemalloc.start()
    stream = Unpacked(io.BytesIO(packed), kind)
    size = sum(map(len, iter(lambda: stream.read(1 << 20), b"")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 300 << 20
    assert peak < 80 << 20


def test_a_frame_that_asks_for_gigabytes_of_window_is_refused():
    parameters = zstandard.ZstdCompressionParameters(window_log=30, compression_level=1)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = packer.compress(b"x" * 100) + packer.flush()
    with pytest.raises(Damaged, match="zst"):
        unpacked(packed, "zst")


def skipped(content: bytes, number: int = 0) -> bytes:
    """A frame that is to be passed over (RFC 8878, 3.1.2)."""
    return struct.pack("<II", 0x184D2A50 + number, len(content)) + content


def test_frames_to_be_skipped_may_stand_anywhere():
    frames = [zstandard.compress(text) for text in (b"one\n", b"", b"two\n" * 5000)]
    # What pzstd writes: before each frame, how long it is.
    pzstd = b"".join(skipped(struct.pack("<I", len(frame))) + frame for frame in frames)
    # zstd's seekable format: a table behind the frames.
    seekable = b"".join(frames) + skipped(b"table" * 100_000, 14)
    for packed in (pzstd, seekable, skipped(b"") + skipped(b"x" * 70_000, 15) + frames[0] + frames[2]):
        assert compression_of(packed[:HEAD_BYTES]) == "zst"
        assert unpacked(packed, "zst") == b"one\n" + b"two\n" * 5000
    with pytest.raises(Damaged, match="ends in the middle"):
        unpacked(skipped(b"x" * 100)[:-1], "zst")


@pytest.mark.parametrize("packed_dictionary", [False, True])
def test_frames_may_need_the_dictionary_that_the_file_begins_with(packed_dictionary):
    texts = [f"WARC/1.0 record {i} of type response with words {i * i}\n".encode() for i in range(2000)]
    dictionary = zstandard.train_dictionary(4096, texts)
    packer = zstandard.ZstdCompressor(dict_data=dictionary)
    content = dictionary.as_bytes()
    first = skipped(zstandard.compress(content) if packed_dictionary else content, 13)
    frames = [packer.compress(text) for text in texts]
    assert unpacked(first + b"".join(frames), "zst") == b"".join(texts)
    with pytest.raises(Damaged, match="zst"):
        unpacked(b"".join(frames), "zst")
    with pytest.raises(Damaged, match="zst"):
        unpacked(skipped(b"no dictionary", 13) + frames[0], "zst")


def test_text_that_begins_like_a_compressed_file_is_text():
    assert compression_of(b"BZh9 is how") is None
    assert compression_of(bz2.compress(b"")) == "bz2"
    assert compression_of(b"]*M\x17") is None
    assert compression_of(b"") is None
