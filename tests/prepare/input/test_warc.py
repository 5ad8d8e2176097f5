"""pkm/prepare/input/warc.py: the articles of web archives, whole or damaged, from wherever reading starts."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
import struct
import zlib
from pathlib import Path

import pytest
import zstandard

from pkm.prepare.input import warc
from pkm.prepare.input.compression import Unpacked
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


def with_dictionary(records: list[bytes]) -> bytes:
    """As the IIPC's recommendation has it: the dictionary is in a frame to be skipped, each record in a frame of its own."""
    dictionary = zstandard.train_dictionary(2048, (records * 20)[:400])
    packer = zstandard.ZstdCompressor(dict_data=dictionary)
    content = dictionary.as_bytes()
    return struct.pack("<II", 0x184D2A5D, len(content)) + content + b"".join(map(packer.compress, records))


STORED = {
    "plain.warc": b"".join,
    "members.warc.gz": lambda records: b"".join(map(gzip.compress, records)),
    "one_member.warc.gz": lambda records: gzip.compress(b"".join(records)),
    "frames.warc.zst": lambda records: b"".join(map(zstandard.compress, records)),
    "packed.warc.xz": lambda records: lzma.compress(b"".join(records)),
    "packed.warc.bz2": lambda records: bz2.compress(b"".join(records)),
    "dictionary.warc.zst": lambda records: with_dictionary(records),
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


@pytest.mark.parametrize("name", ["plain.warc", "members.warc.gz", "one_member.warc.gz", "frames.warc.zst"])
@pytest.mark.parametrize("length", ["999999", "-5", "abc", "1_0", "", "9" * 5000])
def test_a_wrong_content_length_costs_its_record_only(tmp_path: Path, name, length):
    records = articles(20)
    head, _, rest = records[10].partition(b"Content-Length: ")
    records[10] = head + b"Content-Length: " + length.encode() + rest[rest.index(b"\r\n") :]
    found = read(write(tmp_path / name, STORED[name](records)))
    assert [record for record in found if isinstance(record, str)] == texts(20)[:4] + texts(20)[5:]
    ((kind, why),) = [r for r in found if isinstance(r, tuple)]
    assert kind == "damaged" and ("Content-Length" in why or "ends in the middle of a record" in why)


def test_a_page_whose_member_does_not_fit_its_checksum_is_no_article(tmp_path: Path):
    """Stored blocks hold any bytes: only the checksum can tell that they have changed."""
    packed = [gzip.compress(content, 0) for content in articles(20)]
    packed[10] = packed[10].replace(b"article 4", b"artifice 4"[:9])
    found = read(write(tmp_path / "in.warc.gz", b"".join(packed)))
    assert [record for record in found if isinstance(record, str)] == texts(20)[:4] + texts(20)[5:]
    ((kind, why),) = [r for r in found if isinstance(r, tuple)]
    assert kind == "damaged" and "incorrect data check" in why


@pytest.mark.parametrize("name", ["plain.warc", "one_member.warc.gz", "frames.warc.zst", "packed.warc.xz"])
def test_a_clip_costs_what_was_clipped_and_the_record_it_is_in(tmp_path: Path, name):
    rng = random.Random(0)
    pages = [page(" ".join(str(rng.random()) for _ in range(200))) for _ in range(17)]
    data = STORED[name](pages)
    path = write(tmp_path / name, data[: int(len(data) * 0.995)])
    (file,) = list_inputs(PrepareConfig.model_validate({"name": "x", "sources": [{"path": str(path)}]}))
    *before, clip = read_piece(Piece(file), LIMIT)
    assert len(before) == 16 and all(isinstance(text, str) for text in before)
    assert clip.kind == "damaged" and "ends in the middle" in clip.why
    # A seventeenth, about; what is compressed in blocks or read ahead is not exact.
    assert len(data) / 50 < clip.lost < len(data) / 12


@pytest.mark.parametrize("name", ["plain.warc", "one_member.warc.gz"])
def test_a_clip_in_a_header_says_that_the_file_ends_there(tmp_path: Path, name):
    records = articles(5)
    records[-1] = records[-1][:40]
    found = read(write(tmp_path / name, STORED[name](records)))
    assert found == [*texts(4), ("damaged", "the file ends in the middle of a WARC header")]


def test_headers_that_lack_something_say_what(tmp_path: Path):
    lacking = [page("x").replace(name, b"X", 1) for name in (b"Content-Length", b"WARC-Type")]
    endless = b"WARC/1.0\r\nX: " + b"y" * (1 << 17) + b"\r\n\r\n"
    found = read(write(tmp_path / "in.warc", b"".join([*lacking, page("fine"), endless, page("fine too")])))
    assert [r for r in found if isinstance(r, str)] == ["fine", "fine too"]
    assert [r[1] for r in found if isinstance(r, tuple)][:2] == [
        "bad WARC header: no Content-Length",
        "bad WARC header: a line without end",
    ]


@pytest.mark.parametrize("target", [None, 700])
@pytest.mark.parametrize("size", [20, 300, 2000])
def test_members_may_begin_anywhere(tmp_path: Path, size, target):
    """As bgzip writes them: so many bytes each, and an empty one at the end."""
    data = b"".join(articles(12))
    packed = b"".join(gzip.compress(data[i : i + size]) for i in range(0, len(data), size)) + gzip.compress(b"")
    assert read(write(tmp_path / "in.warc.gz", packed), target) == texts(12)


def test_a_member_that_is_broken_in_its_header_counts_once_and_leaves_the_one_before(tmp_path: Path):
    packed = list(map(gzip.compress, articles(20)))
    # Garbage that can be unpacked, but for its checksum, is no more of the record before.
    packed[10] = packed[10].replace(packed[10][10:12], bytes([packed[10][10], packed[10][11] ^ 0x74]), 1)
    found = read(write(tmp_path / "in.warc.gz", b"".join(packed)))
    assert [r for r in found if isinstance(r, str)] == [text for text in texts(20) if text != texts(20)[4]]
    assert [r[0] for r in found if isinstance(r, tuple)] == ["damaged"]


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
    take = Unpacked._more

    def counted(self, size):
        nonlocal unpacked
        data = take(self, size)
        unpacked += len(data)
        return data

    monkeypatch.setattr(Unpacked, "_more", counted)
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


def test_a_page_with_a_bad_byte_or_cut_short_is_read_as_it_declares_itself(tmp_path: Path):
    html = "<html><p>café, déjà vu, naïve</p></html>".encode()
    broken, cut = html.replace(b"vu", b"\xe9"), html[: html.index("ï".encode()) + 1]
    records = [
        page("", body=broken),
        page("", body=cut + b"</p>"),
        page("", body=gzip.compress(broken), Content_Encoding="gzip"),
        page("", body=broken, Content_Type="text/html"),
        page("", body=broken, Content_Type="text/html; charset=iso-8859-1"),
        page("", body=b"<meta charset=utf-8>" + broken, Content_Type="text/html"),
        record("conversion", "café \xa0 déjà".encode()[:-1], **{"Content-Type": "text/plain"}),
        record("resource", b"caf\xe9", **{"Content-Type": "text/plain; charset=iso-8859-1"}),
        page("", body=b"<p>&#xD83D; \xed\xa0\xbd</p>"),
    ]
    found = read(write(tmp_path / "in.warc", b"".join(records)))
    assert found[:6] == ["café, déjà \ufffd, naïve", "café, déjà vu, na\ufffd", *["café, déjà \ufffd, naïve"] * 4]
    assert found[6:] == ["café \xa0 déj\ufffd", "café", "&#xD83D; \ufffd\ufffd\ufffd"]


def test_a_chunked_body_with_a_broken_chunk_keeps_what_follows(tmp_path: Path):
    body = b"9\r\n<p>before\r\n? broken\r\nafter</p>\r\n0\r\n\r\n"
    (found,) = read(write(tmp_path / "in.warc", page("", body=body, Transfer_Encoding="chunked")))
    assert found.startswith("before") and found.endswith("after")


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
