"""pkm/prepare/input/streams.py: bytes come out whole or the reader says where they end, and memory stays bounded."""

from __future__ import annotations

import gzip
import io
import lzma
import tracemalloc
import zlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.prepare.input.streams import Damaged, Unpacked, bounded, compression_of, line_runs, line_start, lines

PACK = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.compress}
FEW = settings(max_examples=40, deadline=None)


def unpacked(data: bytes, kind: str, size: int = 1000) -> bytes:
    stream = Unpacked(io.BytesIO(data), kind)
    return b"".join(iter(lambda: stream.read(size), b""))


@pytest.mark.parametrize("kind", PACK)
def test_members_one_after_the_other_and_padding_are_one_stream(kind):
    text = b"some text\n" * 20_000
    packed = PACK[kind](text[:777]) + PACK[kind](b"") + PACK[kind](text[777:])
    assert compression_of(packed[:6]) == kind
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


@FEW
@given(
    data=st.binary(max_size=60).map(lambda b: b.replace(b"a", b"\n")), limit=st.integers(1, 20), size=st.integers(1, 9)
)
def test_lines_end_at_newlines_only_and_long_ones_are_passed_over(data, limit, size):
    stream = io.BytesIO(data)
    stream.read = lambda _, read=io.BytesIO.read: read(stream, size)
    expected, offset = [], 0
    for line in data.split(b"\n"):
        expected.append((offset, line if len(line) <= limit else None))
        offset += len(line) + 1
    if data.endswith(b"\n") or not data:
        expected.pop()
    assert list(lines(stream, limit)) == expected


@FEW
@given(
    data=st.binary(max_size=80).map(lambda b: b.replace(b"a", b"\n").replace(b"\0", b"\n")),
    limit=st.integers(1, 20),
    size=st.integers(1, 15),
)
def test_runs_of_lines_are_all_lines_but_those_longer_than_limit_and_block(data, limit, size):
    found, offset = b"", 0
    for start, run in line_runs(io.BytesIO(data), limit, size):
        if run is None:
            line = data[start:].split(b"\n")[0]
            assert len(line) > limit
            offset = start + len(line) + 1
            continue
        assert start == offset and run.endswith(b"\n")
        offset += len(run)
        found += run
        assert all(len(line) <= max(limit, size) for line in run.split(b"\n"))
    whole = [line for line in data.split(b"\n") if len(line) <= limit]
    assert [line for line in found.split(b"\n") if line and len(line) <= limit] == [line for line in whole if line]


def test_unicode_line_separators_do_not_end_a_line():
    text = "one\u2028still one\x85 and\x0b so\r\ntwo".encode()
    assert [line for _, line in lines(io.BytesIO(text), 100)] == [
        "one\u2028still one\x85 and\x0b so\r".encode(),
        b"two",
    ]


@FEW
@given(data=st.binary(max_size=40).map(lambda b: b.replace(b"\0", b"\n")), position=st.integers(0, 40))
def test_a_byte_range_begins_at_the_first_line_that_starts_in_it(data, position):
    position = min(position, len(data))
    starts = [0, *(i + 1 for i, byte in enumerate(data) if byte == 10), len(data)]
    assert line_start(io.BytesIO(data), position) == min(s for s in starts if s >= position)


def test_bodies_of_responses_unpack_up_to_a_limit():
    assert bounded(gzip.compress(b"page"), "gzip", 10) == b"page"
    assert bounded(zlib.compress(b"page"), "deflate", 10) == b"page"
    bare = zlib.compressobj(wbits=-15)
    assert bounded(bare.compress(b"page") + bare.flush(), "deflate", 10) == b"page"
    for encoding, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        with pytest.raises(OverflowError):
            bounded(pack(bytes(1000)), encoding, 999)
        with pytest.raises(Damaged):
            bounded(pack(b"page")[:2] + b"\xff" * 30, encoding, 999)
