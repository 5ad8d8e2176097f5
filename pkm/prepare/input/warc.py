"""Articles out of web archives (WARC 1.0 and 1.1, ISO 28500; WET): HTML pages to text, English or not.

Common Crawl's archives compress every record by itself ("members"): a reader can start at any of them, and goes on at
the next one after damage or after a record that unpacks to too much. Where a whole archive is one member it is read
through.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from pkm.prepare.input.extract import extract
from pkm.prepare.input.records import Found, Skipped, decoded, too_large
from pkm.prepare.input.sources import Piece
from pkm.prepare.input.streams import BLOCK, Damaged, Unpacked, bounded, compression_of, line_start, open_raw

LONGEST_LINE, MOST_HEADERS = 1 << 16, 1000
HTML = ("text/html", "application/xhtml+xml")
MEMBER = b"\x1f\x8b\x08"
# A record is read past, block by block, up to so many times the limit; beyond it the next member is looked for instead.
PATIENCE = 16
META_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?\s*([A-Za-z0-9_:-]{2,40})""", re.IGNORECASE)


class _TooLarge(Exception):
    """A record that would have to be unpacked far beyond the limit to be passed over."""


def read_warc(piece: Piece, limit: int) -> Iterator[Found]:
    """The articles of the records that begin in a piece of an archive."""
    url = piece.file.url
    with open_raw(url) as raw:
        kind = compression_of(raw.read(6))
        if kind == "gz":
            yield from _members(raw, piece, limit)
        elif kind is None:
            position = line_start(raw, piece.start)
            raw.seek(position)
            yield from _guarded(_Buffer(raw, position), raw, piece, limit)
        elif piece.start == 0:
            raw.seek(0)
            yield from _guarded(_Buffer(Unpacked(raw, kind), 0), raw, piece, limit)


def _guarded(stream: _Buffer, raw: BinaryIO, piece: Piece, limit: int) -> Iterator[Found]:
    """The records of an archive that is one stream; what follows after damage to the stream itself is lost."""
    stop = None if stream.stream is not raw else piece.stop
    try:
        yield from _records(stream, piece.file.url, limit, stop)
    except Damaged as error:
        where = f"{piece.file.url}, byte {stream.stream.tell()}"
        yield Skipped("damaged", where, str(error), lost=max(0, piece.file.size - stream.stream.tell()))
    except _TooLarge:
        where = f"{piece.file.url}, byte {raw.tell()}"
        yield too_large(where, limit)
        yield Skipped("damaged", where, "what follows it is not read", lost=max(0, piece.file.size - raw.tell()))


def _members(raw: BinaryIO, piece: Piece, limit: int) -> Iterator[Found]:
    """The records of the gzip members that begin in the piece."""
    url, size = piece.file.url, piece.file.size
    position: int | None = _next_member(raw, piece.start)
    if piece.start == 0 and position != 0:
        yield Skipped("damaged", f"{url}, byte 0", "no WARC record at the beginning", lost=position or size)
    while position is not None and (piece.stop is None or position < piece.stop):
        where = f"{url}, byte {position}"
        raw.seek(position)
        member = _OneMember(raw, position)
        end: int | None
        try:
            yield from _records(_Buffer(member, 0), where, limit, None)
            end = member.end()
        except Damaged as error:
            end = _next_member(raw, position + 1)
            yield Skipped("damaged", where, str(error), lost=(size if end is None else end) - position)
        except _TooLarge:
            yield too_large(where, limit)
            end = _next_member(raw, position + 1)
        if end is None or end >= size:
            return
        position = _next_member(raw, end)
        if position != end:
            after = size if position is None else position
            raw.seek(end)
            if raw.read(min(after - end, BLOCK)).strip(b"\0"):
                yield Skipped("damaged", f"{url}, byte {end}", "no WARC record", lost=after - end)


def _next_member(raw: BinaryIO, position: int) -> int | None:
    """Where the first gzip member at or after `position` begins that holds a WARC record; None if none does."""
    while True:
        raw.seek(position)
        block = raw.read(BLOCK)
        if len(block) < len(MEMBER):
            return None
        found = block.find(MEMBER)
        while found >= 0:
            raw.seek(position + found)
            try:
                head = zlib.decompressobj(31).decompress(raw.read(4096), 512)
            except zlib.error:
                head = b""
            if head.lstrip().startswith(b"WARC/"):
                return position + found
            found = block.find(MEMBER, found + 1)
        position += len(block) - len(MEMBER) + 1


class _OneMember:
    """The text of one gzip member of a file; b"" at its end."""

    def __init__(self, raw: BinaryIO, position: int):
        self._raw, self._position = raw, position
        self._object = zlib.decompressobj(31)
        self._input = b""
        self._taken = 0

    def read(self, size: int) -> bytes:
        while not self._object.eof:
            starved = False
            if not self._input:
                self._raw.seek(self._position + self._taken)
                self._input = self._raw.read(BLOCK)
                self._taken += len(self._input)
                starved = not self._input
            try:
                output = self._object.decompress(self._input, size)
            except zlib.error as error:
                raise Damaged(f"broken gz data: {error}") from error
            self._input = self._object.unconsumed_tail
            if output:
                return output
            if starved and not self._object.eof:
                raise Damaged("the file ends in the middle of its gz data")
        return b""

    def end(self) -> int:
        """Where the member ends in the file; what is left of it is read past."""
        while self.read(1 << 20):
            pass
        return self._position + self._taken - len(self._object.unused_data)


class _Buffer:
    """Lines and blocks from a stream. `offset` counts the bytes given out."""

    def __init__(self, stream: Any, offset: int):
        self.stream, self.offset = stream, offset
        self._data = b""

    def line(self) -> bytes:
        """The next line with its newline; b"" at the end. Raises Damaged for one of unlikely length."""
        while (end := self._data.find(b"\n")) < 0:
            if len(self._data) > LONGEST_LINE:
                raise Damaged("a header line without end")
            block = self.stream.read(BLOCK)
            if not block:
                end = len(self._data) - 1
                break
            self._data += block
        return self._give(end + 1)

    def past_line(self) -> bool:
        """Read past the rest of a line, however long; False at the end."""
        while (end := self._data.find(b"\n")) < 0:
            self._give(len(self._data))
            self._data = self.stream.read(BLOCK)
            if not self._data:
                return False
        self._give(end + 1)
        return True

    def peek(self, size: int) -> bytes:
        while len(self._data) < size and (block := self.stream.read(BLOCK)):
            self._data += block
        return self._data[:size]

    def take(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end."""
        parts = [self._give(min(size, len(self._data)))]
        left = size - len(parts[0])
        while left and (block := self.stream.read(min(left, 1 << 20))):
            self.offset += len(block)
            parts.append(block)
            left -= len(block)
        return b"".join(parts)

    def skip(self, size: int) -> int:
        """Read past `size` bytes; how many there were."""
        left = size
        while left and (piece := self.take(min(left, 1 << 20))):
            left -= len(piece)
        return size - left

    def _give(self, size: int) -> bytes:
        piece, self._data = self._data[:size], self._data[size:]
        self.offset += len(piece)
        return piece


def _records(stream: _Buffer, where: str, limit: int, stop: int | None) -> Iterator[Found]:
    """The articles of the records of one stream that begin before `stop`. Damaged headers cost their record only."""
    # From within a file, reading begins in the middle of a record, which is another reader's.
    lost_way = stream.offset > 0
    while head := stream.peek(5):
        begin = stream.offset
        if stop is not None and begin >= stop:
            return
        if not head.startswith(b"WARC/"):
            blank = not head[:2].strip()
            if not blank and not lost_way:
                yield Skipped("damaged", f"{where}, byte {begin} of its text", "no WARC record where one should begin")
                lost_way = True
            if not stream.past_line():
                return
            continue
        try:
            headers = _headers(stream)
            length = int(headers["content-length"])
            kind = headers["warc-type"]
            if length < 0:
                raise ValueError
        except (Damaged, KeyError, ValueError) as error:
            if not lost_way:
                yield Skipped("damaged", where, f"bad WARC header: {error}")
            lost_way = True
            continue
        lost_way = False
        yield from _record(stream, headers, kind, length, where, limit)


def _record(
    stream: _Buffer, headers: dict[str, str], kind: str, length: int, where: str, limit: int
) -> Iterator[Found]:
    """What one record gives. Leaves the stream behind its content."""
    if headers.get("warc-target-uri"):
        where = f"{where} ({headers['warc-target-uri'][:200]})"
    article = kind in ("response", "conversion", "resource")
    if not article or length > limit:
        if length > PATIENCE * limit:
            raise _TooLarge
        skipped = stream.skip(length)
        if skipped < length:
            raise Damaged("the file ends in the middle of a record")
        yield too_large(where, limit) if article else Skipped("not_an_article", where, f"a record of type {kind[:40]}")
        return
    content = stream.take(length)
    if len(content) < length:
        raise Damaged("the file ends in the middle of a record")
    try:
        yield _article(headers, kind, content, where, limit)
    except OverflowError:
        yield too_large(where, limit)
    except Damaged as error:
        yield Skipped("damaged", where, str(error))


def _headers(stream: _Buffer) -> dict[str, str]:
    """Header lines up to a blank one, names in lower case; of a repeated name the first counts."""
    stream.line()
    headers: dict[str, str] = {}
    for _ in range(MOST_HEADERS):
        line = stream.line().decode("utf-8", "replace").strip()
        if not line:
            return headers
        name, colon, value = line.partition(":")
        if colon:
            headers.setdefault(name.strip().lower(), value.strip())
    raise Damaged(f"more than {MOST_HEADERS} header lines")


def _article(headers: dict[str, str], kind: str, content: bytes, where: str, limit: int) -> Found:
    """The text of a page. Raises Damaged where its body is broken, OverflowError where it unpacks to too much."""
    if kind == "conversion":
        return decoded(content, where)
    media = headers.get("warc-identified-payload-type", "")
    charset = ""
    if kind == "response" and content.startswith(b"HTTP/"):
        head, body = _split_http(content)
        if head.get("status", "")[:1] != "2":
            return Skipped("not_an_article", where, f"a response of status {head.get('status', '')[:3]}")
        charset = head.get("content-type", "")
        media = media or charset
        content = _body(head, body, limit)
    else:
        charset = headers.get("content-type", "")
        media = media or charset
    media = media.partition(";")[0].strip().lower()
    if media == "text/plain" and kind == "resource" and not headers.get("warc-target-uri", "").startswith("metadata:"):
        return decoded(content, where)
    if media not in HTML:
        return Skipped("not_an_article", where, f"not a page but {media[:60] or 'of unknown type'}")
    text = extract(_decode_page(content, charset))
    return Skipped("not_an_article", where, "a page without an article") if text is None else text


def _split_http(content: bytes) -> tuple[dict[str, str], bytes]:
    """Headers of an HTTP response (with its `status`) and its body."""
    blank = re.search(rb"\r?\n\r?\n", content)
    head = content[: blank.start()] if blank else content
    lines = head.decode("iso-8859-1").splitlines()
    headers = {"status": [*lines[0].split(None, 2), "", ""][1]}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers.setdefault(name.strip().lower(), value.strip())
    return headers, content[blank.end() :] if blank else b""


def _body(headers: dict[str, str], body: bytes, limit: int) -> bytes:
    """The body of a response without its transfer and content encodings (which some crawlers have undone already)."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = _unchunked(body)
    encoding = headers.get("content-encoding", "").lower()
    if encoding in ("gzip", "x-gzip") and body.startswith(MEMBER[:2]):
        return bounded(body, "gzip", limit)
    if encoding == "deflate" and not body.lstrip().startswith(b"<"):
        return bounded(body, "deflate", limit)
    return body


def _unchunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    position = 0
    while size := re.compile(rb"([0-9A-Fa-f]{1,8})[^\n]{0,100}\n").match(body, position):
        length = int(size[1], 16)
        if length == 0:
            return b"".join(parts)
        parts.append(body[size.end() : size.end() + length])
        position = size.end() + length + 2
    # Not chunked after all, or cut short: what is there is taken as it is.
    return b"".join(parts) if parts else body


def _decode_page(content: bytes, content_type: str) -> str:
    """A page as text: UTF-8 if it is that, else what it says to be, else what browsers take for the web's default."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    named = re.search(r"charset\s*=\s*[\"']?([\w:-]{2,40})", content_type, re.IGNORECASE)
    meta = META_CHARSET.search(content[:4096])
    for name in (named[1] if named else "", meta[1].decode() if meta else ""):
        try:
            codec = codecs.lookup(name).name if name else "utf-8"
        except LookupError:
            continue
        if codec not in ("utf-8", "ascii", "iso8859-1"):
            try:
                return content.decode(codec, "replace")
            except (LookupError, UnicodeError):
                continue
    return content.decode("cp1252", "replace")
