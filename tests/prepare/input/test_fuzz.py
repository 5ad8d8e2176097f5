"""Bytes of inputs flipped, cut out, cut off and joined: what comes before is read, the rest is counted, nothing breaks.

Over 2,000 damaged files. What is intact is told by the plain decompressors and by where records end, not by the readers.
"""

from __future__ import annotations

import bz2
import lzma
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

import pytest
import zstandard

from pkm.errors import UserError
from pkm.prepare.input import warc
from pkm.prepare.input.readers import read_piece
from pkm.prepare.input.records import Found, Skipped
from pkm.prepare.input.sources import Piece, pieces_of
from tests.support.reading import inputs
from tests.support.written import PACKS, ending, json_array, json_lines, pages, parquet, wet

LIMIT = 1 << 16
RECORDS = 60
TIMES = 48
"""Damaged copies of each file."""


@dataclass(frozen=True)
class Sample:
    """A file. ends: where in its text each record ends, from which on damage does not change it."""

    name: str
    data: bytes
    texts: list[str]
    ends: list[int]
    pack: str = "plain"
    documents: str = "file"


def made_texts(count: int) -> list[str]:
    rng = random.Random(5)
    words = ["oil", "price", "naïve", "日本語", "\U0001f600", '"quoted"', "back\\slash", "a", "of", "1,000"]
    return [f"{i} " + " ".join(rng.choices(words, k=rng.randint(1, 30))) for i in range(count)]


def _ends(parts: list[bytes]) -> list[int]:
    return list(accumulate(map(len, parts)))


def samples() -> dict[str, Sample]:
    texts = made_texts(RECORDS)
    found = {}
    lines = [f"{text}\n".encode() for text in texts]
    objects = json_lines(texts).splitlines(keepends=True)
    array = json_array(texts, 1)
    # Behind each object's brace, which stands alone at the indentation of the array's.
    closes = [i + 3 for i in range(len(array)) if array[i : i + 4] in (b"\n },", b"\n }\n")]
    records = {"wet": wet(texts), "pages": pages(texts)}
    for pack in PACKS:
        end = ending(pack)
        pack_of = PACKS[pack]
        found[f"lines {pack}"] = Sample(f"in.txt{end}", pack_of(b"".join(lines)), texts, _ends(lines), pack, "line")
        found[f"json lines {pack}"] = Sample(f"in.jsonl{end}", pack_of(b"".join(objects)), texts, _ends(objects), pack)
        for name, written in records.items():
            whole = pack_of(b"".join(written))
            ends = [end for end, record in zip(_ends(written), written, strict=True) if _is_article(record)]
            found[f"{name} {pack}"] = Sample(f"in.warc{end}", whole, texts, ends, pack)
    of_lines = [text.replace(" of ", "\nof ") for text in texts]
    blank = [f"{text}\n\n".encode() for text in of_lines]
    for pack in ("plain", "gz", "two zst"):
        found[f"blank {pack}"] = Sample(
            f"in.txt{ending(pack)}", PACKS[pack](b"".join(blank)), of_lines, _ends(blank), pack, "blank"
        )
        found[f"array {pack}"] = Sample(f"in.json{ending(pack)}", PACKS[pack](array), texts, closes, pack)
    return found


def _is_article(record: bytes) -> bool:
    return b"WARC-Type: conversion" in record or b"WARC-Type: response" in record


SAMPLES = samples()


def damaged(data: bytes, rng: random.Random) -> tuple[bytes, int]:
    """(a copy that is damaged, where damage begins)."""
    at = rng.randrange(len(data))
    how = rng.choice(["flip", "flips", "run", "cut off", "cut out", "put in", "join"])
    if how == "flip":
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :], at
    if how == "flips":
        changed = bytearray(data)
        places = [rng.randrange(len(data)) for _ in range(5)]
        for place in places:
            changed[place] ^= rng.randrange(1, 256)
        return bytes(changed), min(places)
    length = rng.choice([1, 7, 100, 1000])
    if how == "run":
        return data[:at] + rng.randbytes(length) + data[at + length :], at
    if how == "cut off":
        return data[:at], at
    if how == "cut out":
        return data[:at] + data[at + length :], at
    if how == "put in":
        return data[:at] + rng.randbytes(length) + data[at:], at
    return data[:at] + data[rng.randrange(len(data)) :], at


def unpacked(data: bytes, pack: str) -> bytes:
    """What the beginning of a packed file gives."""
    makers: dict[str, Callable] = {
        "gz": lambda: zlib.decompressobj(31),
        "zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
        "xz": lzma.LZMADecompressor,
        "bz2": bz2.BZ2Decompressor,
    }
    output = b""
    while data and pack != "plain":
        member = makers[pack.rpartition(" ")[2]]()
        output += member.decompress(data)
        data = member.unused_data if member.eof else b""
    return output or data


def found_in(path: Path, sample: Sample, target: int | None = None) -> list[Found]:
    found: list[Found] = []
    most = 50 * len(sample.data)
    for file in inputs(str(path), documents=sample.documents):
        for piece in pieces_of(file, target) if target else [Piece(file)]:
            found += islice(read_piece(piece, LIMIT), most)
    assert len(found) < most, "it goes on and on"
    return found


@pytest.fixture(autouse=True)
def plain_extraction(monkeypatch):
    monkeypatch.setattr(warc, "extract", lambda page: page.partition("<p>")[2].partition("</p>")[0])


@pytest.mark.parametrize("name", SAMPLES)
def test_damage_anywhere_is_counted_and_what_comes_before_it_is_read(tmp_path: Path, name):
    sample, rng = SAMPLES[name], random.Random(name)
    path = tmp_path / sample.name
    for number in range(TIMES):
        data, at = damaged(sample.data, rng)
        path.write_bytes(data)
        found = found_in(path, sample)
        texts = [record for record in found if isinstance(record, str)]
        skipped = [record for record in found if isinstance(record, Skipped)]
        for text in texts:
            text.encode()
        before = unpacked(data[:at], sample.pack)
        intact = sum(end <= len(before) for end in sample.ends)
        # Whether the last one of a stream is followed by nothing is not known where its checksum cannot be read.
        intact -= sample.name.startswith("in.warc") and len(before) == sample.ends[-1] and sample.pack != "plain"
        assert texts[:intact] == sample.texts[:intact], (number, at)
        assert all(0 <= record.lost <= len(data) and record.where and record.why for record in skipped)
        assert sum(record.lost for record in skipped) <= len(data)
        if data == sample.data[:at] and sample.pack != "plain" and len(unpacked(data, sample.pack)) < sample.ends[-1]:
            # A record without the blank lines behind it is whole.
            assert texts == sample.texts[: len(texts)] and len(texts) <= intact + 1, (number, at)
            assert [record.kind for record in skipped if record.kind != "not_an_article"] in ([], ["damaged"])
        if sample.pack == "plain" and (sample.documents == "line" or sample.name == "in.jsonl"):
            assert len(found) == sum(map(bool, map(bytes.strip, data.split(b"\n")))), (number, at)
            pieces = found_in(path, sample, 200)
            assert [r if isinstance(r, str) else r.kind for r in pieces] == [
                r if isinstance(r, str) else r.kind for r in found
            ], (number, at)


@pytest.mark.parametrize("each", ["gz", "zst", "xz", "bz2"])
def test_damage_costs_web_archives_of_a_member_a_record_what_is_in_it(tmp_path: Path, each):
    members = list(map(PACKS[each], pages(made_texts(RECORDS))))
    sample = Sample(f"in.warc.{each}", b"".join(members), made_texts(RECORDS), _ends(members)[1::2], each)
    rng, path = random.Random(each), tmp_path / sample.name
    for number in range(TIMES):
        data, at = damaged(sample.data, rng)
        path.write_bytes(data)
        found = found_in(path, sample)
        texts = [record for record in found if isinstance(record, str)]
        intact = sum(end <= at for end in sample.ends)
        assert texts[:intact] == sample.texts[:intact], (number, at)
        if each == "gz" and len(data) == len(sample.data):
            # Members behind the damage are found again.
            last = max(i for i in range(len(data)) if data[i] != sample.data[i]) if data != sample.data else 0
            behind = sum(
                start > last for start in [end - len(m) for end, m in zip(sample.ends, members[1::2], strict=True)]
            )
            assert texts[len(texts) - behind :] == sample.texts[RECORDS - behind :], (number, at)


@pytest.mark.parametrize("kind", ["string", "binary", "dictionary"])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_damage_to_parquet_files_costs_row_groups_or_is_said_of_the_file(tmp_path: Path, kind, compression):
    texts = made_texts(RECORDS)
    sample = Sample("in.parquet", parquet(texts, kind, 7, compression), texts, [])
    rng, path = random.Random(kind + compression), tmp_path / sample.name
    for number in range(TIMES):
        data, at = damaged(sample.data, rng)
        path.write_bytes(data)
        try:
            found = found_in(path, sample)
        except UserError as error:
            # Of a footer that is read, but names other columns or types.
            assert error.fix and "in.parquet" in str(error)
            continue
        for record in found:
            assert isinstance(record, Skipped) or record.encode() is not None, number
        records = sum(record.records if isinstance(record, Skipped) else 1 for record in found)
        assert records in (RECORDS, 1), (number, at)
