"""pkm/prepare/input/warc.py: the articles of web archives, whole or damaged, from wherever reading starts."""

from __future__ import annotations

import gzip
import lzma
import zlib
from pathlib import Path

import pytest
import zstandard

from pkm.prepare.input import warc
from pkm.prepare.input.readers import read_piece
from pkm.prepare.input.records import Skipped
from pkm.prepare.input.sources import Piece, list_inputs, pieces_of
from pkm.prepare.settings import PrepareConfig

LIMIT = 1 << 20
HEAD = "<html><head><title>News</title></head><body><article><h1>News of the day</h1>"
SENTENCE = "The minister said on Monday that talks about the price of oil would go on for another week. "


@pytest.fixture(autouse=True)
def plain_extraction(monkeypatch, request):
    """Pages lose their tags, nothing else: what trafilatura does is tried once, below."""
    if "trafilatura" not in request.node.name:
        monkeypatch.setattr(warc, "extract", lambda html: html.partition("<p>")[2].partition("</p>")[0] or None)


def record(kind: str, content: bytes, uri: str = "http://example.com/", **headers: str) -> bytes:
    fields = {"WARC-Type": kind, "WARC-Target-URI": uri, "Content-Length": str(len(content)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"WARC/1.0\r\n{head}\r\n".encode() + content + b"\r\n\r\n"


def page(text: str, status: str = "200 OK", body: bytes | None = None, **headers: str) -> bytes:
    body = f"<html><p>{text}</p></html>".encode() if body is None else body
    fields = {"Content-Type": "text/html; charset=utf-8", **{k.replace("_", "-"): v for k, v in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return record("response", f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body)


def articles(count: int) -> list[bytes]:
    """An archive: what crawlers write around each page, and the page."""
    found = [record("warcinfo", b"software: x\r\n")]
    for i in range(count):
        found += [record("request", b"GET / HTTP/1.1\r\n\r\n"), page(f"article {i} " + SENTENCE * (i % 5))]
    return found


def texts(count: int) -> list[str]:
    return [f"article {i} " + SENTENCE * (i % 5) for i in range(count)]


def read(path: Path, target: int | None = None, limit: int = LIMIT) -> list:
    """Texts, and (kind, why) of what was skipped and is damaged or too large."""
    file = list_inputs(PrepareConfig.model_validate({"name": "x", "sources": [{"path": str(path), "format": "warc"}]}))[
        0
    ]
    found = []
    for piece in pieces_of(file, target) if target else [Piece(file)]:
        found += read_piece(piece, limit)
    return [
        (r.kind, r.why) if isinstance(r, Skipped) else r
        for r in found
        if isinstance(r, str) or r.kind != "not_an_article"
    ]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


STORED = {
    "plain.warc": b"".join,
    "members.warc.gz": lambda records: b"".join(map(gzip.compress, records)),
    "one_member.warc.gz": lambda records: gzip.compress(b"".join(records)),
    "frames.warc.zst": lambda records: b"".join(map(zstandard.compress, records)),
    "packed.warc.xz": lambda records: lzma.compress(b"".join(records)),
}


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("target", [None, 200, 1000, 5000])
def test_every_page_comes_once_and_in_order_from_any_pieces(tmp_path: Path, name, target):
    path = write(tmp_path / name, STORED[name](articles(40)))
    assert read(path, target) == texts(40)
    if target == 200 and name in ("plain.warc", "members.warc.gz"):
        file = list_inputs(PrepareConfig.model_validate({"name": "x", "sources": [{"path": str(path)}]}))[0]
        assert len(pieces_of(file, target)) > 10


@pytest.mark.parametrize("name", ["plain.warc", "members.warc.gz", "one_member.warc.gz"])
@pytest.mark.parametrize("target", [None, 500])
def test_bad_headers_cost_their_record_only(tmp_path: Path, name, target):
    records = articles(20)
    records[10] = records[10].replace(b"Content-Length", b"Content-Size", 1)
    found = read(write(tmp_path / name, STORED[name](records)), target)
    expected = [text for text in texts(20) if text != texts(20)[4]]
    assert [record for record in found if isinstance(record, str)] == expected
    assert [kind for kind, _ in (r for r in found if isinstance(r, tuple))] == ["damaged"]


def test_a_broken_member_costs_its_record_only(tmp_path: Path):
    packed = list(map(gzip.compress, articles(20)))
    packed[10] = packed[10][:40] + bytes(len(packed[10]) - 40)
    found = read(write(tmp_path / "in.warc.gz", b"".join(packed)))
    assert [r for r in found if isinstance(r, str)] == [text for text in texts(20) if text != texts(20)[4]]
    assert [r[0] for r in found if isinstance(r, tuple)] == ["damaged"]


@pytest.mark.parametrize("name", ["plain.warc", "members.warc.gz", "frames.warc.zst"])
def test_an_archive_cut_off_in_the_middle_gives_what_comes_before_and_one_damage(tmp_path: Path, name):
    data = STORED[name](articles(20))
    found = read(write(tmp_path / name, data[: len(data) - 60]))
    assert found[:-1] == texts(19)
    assert found[-1][0] == "damaged" and "ends in the middle" in found[-1][1]


def test_junk_between_members_is_named_and_passed_over(tmp_path: Path):
    packed = list(map(gzip.compress, articles(3)))
    found = read(write(tmp_path / "in.warc.gz", packed[0] + b"junk" * 30000 + b"".join(packed[1:])))
    assert found == [("damaged", "no WARC record"), *texts(3)]
    found = read(write(tmp_path / "other.warc.gz", gzip.compress(b"not an archive")))
    assert found == [("damaged", "no WARC record at the beginning")]


def test_a_record_over_the_limit_is_skipped_and_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch):
    bomb = zlib.compressobj(9, wbits=31)
    size = 300 << 20
    head = (
        record("response", b"").split(b"\r\n\r\n")[0].replace(b"Content-Length: 0", f"Content-Length: {size}".encode())
    )
    packed = bomb.compress(head + b"\r\n\r\nHTTP/1.1 200 OK\r\n\r\n")
    packed += b"".join(bomb.compress(bytes(1 << 20)) for _ in range(300)) + bomb.flush()
    records = [gzip.compress(r) for r in (page("before"), page("x" * 3000), page("after"))]
    path = write(tmp_path / "in.warc.gz", records[0] + packed + records[1] + records[2])
    unpacked = 0
    take = warc._OneMember.read

    def counted(self, size):
        nonlocal unpacked
        data = take(self, size)
        unpacked += len(data)
        return data

    monkeypatch.setattr(warc._OneMember, "read", counted)
    large = ("too_large", "larger than 0.00190735 MB")
    assert read(path, limit=2000) == ["before", large, large, "after"]
    assert unpacked < 1 << 20


def test_a_page_that_unpacks_to_too_much_is_too_large(tmp_path: Path):
    body = gzip.compress(bytes(2 << 20))
    found = read(write(tmp_path / "in.warc", page("", body=body, Content_Encoding="gzip")))
    assert found == [("too_large", "larger than 1 MB")]


def test_bodies_are_decoded_as_servers_sent_them(tmp_path: Path):
    html = "<html><p>café</p></html>"
    chunked = b"5\r\n" + html.encode()[:5] + b"\r\n" + f"{len(html.encode()) - 5:x}\r\n".encode() + html.encode()[5:]
    latin = {"Content_Type": "text/html; charset=ISO-8859-1"}
    pages = [
        page("", body=gzip.compress(html.encode()), Content_Encoding="gzip"),
        page("", body=zlib.compress(html.encode()), Content_Encoding="deflate"),
        page("", body=html.encode(), Content_Encoding="gzip"),
        page("", body=chunked + b"\r\n0\r\n\r\n", Transfer_Encoding="chunked"),
        page("", body=html.encode(), Transfer_Encoding="chunked"),
        page("", body=html.encode("latin-1"), **latin),
        page("", body=html.encode("utf-8"), **latin),
        page("", body=b'<meta charset="cp1250">' + html.encode("cp1250"), Content_Type="text/html"),
        page("", body=html.encode("utf-16"), Content_Type="text/html; charset=utf-16"),
    ]
    assert read(write(tmp_path / "in.warc", b"".join(pages))) == ["café"] * len(pages)


def test_what_is_not_a_page_is_no_article_and_no_damage(tmp_path: Path):
    records = [
        page("gone", status="404 Not Found"),
        page("", body=b"\x89PNG", Content_Type="image/png"),
        record("metadata", b"x: y"),
        record("revisit", b"HTTP/1.1 200 OK\r\n\r\n"),
        record("resource", b"GIF", **{"Content-Type": "image/gif"}),
        record("resource", b"wget's log", "metadata://gnu.org/log", **{"Content-Type": "text/plain"}),
        record("resource", b"<html><p>saved page</p></html>", **{"Content-Type": "text/html"}),
        record("conversion", b"text of a WET file", **{"Content-Type": "text/plain"}),
        page("", body=b"<html>nothing</html>"),
    ]
    assert read(write(tmp_path / "in.warc", b"".join(records))) == ["saved page", "text of a WET file"]


def test_a_space_in_an_address_or_a_folded_header_does_no_harm(tmp_path: Path):
    odd = record("response", b"HTTP/1.1 200\r\nContent-Type: text/html\r\n\r\n<p>odd</p>", "file:///with spaces.html")
    assert read(write(tmp_path / "in.warc", b"\r\n\r\n" + odd + b"\r\n" + page("even"))) == ["odd", "even"]


def test_trafilatura_takes_the_article_out_of_a_page_and_survives_a_hard_one(tmp_path: Path):
    body = (
        HEAD + "".join(f"<p>{SENTENCE * 3}</p>" for _ in range(4)) + "</article><footer>About us</footer></body></html>"
    )
    pages = [page("", body=body.encode()), page("", body=b"<div>" * 50_000), page("", body=body.encode())]
    found = read(write(tmp_path / "in.warc", b"".join(pages)))
    assert found[0] == found[-1]
    assert SENTENCE.strip() in found[0] and "About us" not in found[0] and "<p>" not in found[0]
