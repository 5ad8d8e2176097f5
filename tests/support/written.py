"""Documents written in every format and compression that is read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import struct
from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

Pack = Callable[[bytes], bytes]


def _cut_in_two(pack: Pack) -> Pack:
    """Two members, frames or streams one after the other."""
    return lambda data: pack(data[: len(data) // 2]) + pack(data[len(data) // 2 :])


def _skippable_first(data: bytes) -> bytes:
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(data)
    return struct.pack("<III", 0x184D2A50, 4, len(frame)) + frame


PACKS: dict[str, Pack] = {
    "plain": bytes,
    "gz": lambda data: gzip.compress(data, 6, mtime=0),
    "zst": zstandard.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "two gz": _cut_in_two(gzip.compress),
    "two zst": _cut_in_two(zstandard.compress),
    "two xz": _cut_in_two(lzma.compress),
    "two bz2": _cut_in_two(bz2.compress),
    "skippable zst": _skippable_first,
}


def ending(pack: str) -> str:
    """Of the name of a file that is packed so."""
    return "" if pack == "plain" else "." + pack.rpartition(" ")[2]


def json_lines(texts: Sequence[str], ascii: bool = False) -> bytes:
    lines = (
        json.dumps({"id": i, "url": "http://a/", "text": text, "of": {"text": ""}}, ensure_ascii=ascii)
        for i, text in enumerate(texts)
    )
    return "".join(f"{line}\n" for line in lines).encode()


def json_array(texts: Sequence[str], indent: int | None = None) -> bytes:
    return json.dumps([{"text": text, "tags": ["a", {"b": 1}]} for text in texts], indent=indent).encode()


PARQUET: dict[str, pa.DataType] = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
    "binary_view": pa.binary_view(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "dictionary_of_large": pa.dictionary(pa.int16(), pa.large_string()),
}


def parquet(texts: Sequence[str | None], kind: str, rows: int, compression: str = "snappy") -> bytes:
    """rows: of a row group. Beside the texts are an id, a date and a struct."""
    column = pa.array(texts, pa.string()).cast(PARQUET[kind])
    table = {
        "id": pa.array(range(len(texts)), pa.int64()),
        "date": pa.array([0] * len(texts), pa.timestamp("s")),
        "of": pa.array([{"text": "no"}] * len(texts), pa.struct([("text", pa.string())])),
        "text": column,
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(table), sink, row_group_size=rows, compression=compression)
    return sink.getvalue()


def warc_record(kind: str, content: bytes, **headers: str) -> bytes:
    fields = {
        "WARC-Type": kind,
        "WARC-Target-URI": "http://example.com/",
        "Content-Length": str(len(content)),
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"WARC/1.0\r\n{head}\r\n".encode() + content + b"\r\n\r\n"


def wet(texts: Sequence[str]) -> list[bytes]:
    """The records of an archive of texts, what is around them too."""
    plain = {"Content-Type": "text/plain"}
    return [warc_record("warcinfo", b"software: x\r\n")] + [
        warc_record("conversion", text.encode(), **plain) for text in texts
    ]


def pages(texts: Sequence[str]) -> list[bytes]:
    """The records of an archive of pages, whose texts stand between <p> and </p>."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n"
    found = []
    for text in texts:
        found.append(warc_record("request", b"GET / HTTP/1.1\r\n\r\n"))
        found.append(warc_record("response", head + f"<html><p>{text}</p></html>".encode()))
    return found
