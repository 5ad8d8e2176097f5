"""pkm/prepare/input/streams.py: bytes come out whole or the reader says where they end, and memory stays bounded."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.prepare.input.records import Damaged
from pkm.prepare.input.streams import bounded, line_runs, line_start, lines

PACK = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.compress}
FEW = settings(max_examples=40, deadline=None)


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
