"""Articles out of web archives (WARC 1.0 and 1.1, ISO 28500; WET): HTML pages to text, English or not.

Common Crawl's archives compress every record by itself ("members"): a reader can start at any of them, and goes on at
the next one after damage or after a record that unpacks to too much. Where members begin anywhere, or a whole archive is
one, they are read through up to the next that begins with a record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from pkm.prepare.input.compression import BLOCK, HEAD_BYTES, Mismatch, Unpacked, compression_of
from pkm.prepare.input.encodings import page_text
from pkm.prepare.input.extract import extract
from pkm.prepare.input.records import Damaged, Found, Skipped, article, too_large
from pkm.prepare.input.sources import Piece
from pkm.prepare.input.streams import bounded, line_start, open_raw

LONGEST_LINE, MOST_HEADERS = 1 << 16, 1000
HTML = ("text/html", "application/xhtml+xml")
MEMBER = b"\x1f\x8b\x08"
# A record is read past, block by block, up to so many times the limit; beyond it the next member is looked for instead.
PATIENCE = 16
RECORD, BLANKS = b"WARC/1.", b"\r\n \t"


class _BadHeader(Exception):
    """The header of a record that does not say what it should."""


class _TooLarge(Exception):
    """A record that would have to be unpacked far beyond the limit to be passed over."""


def read_warc(piece: Piece, limit: int) -> Iterator[Found]:
    """The articles of the records that begin in a piece of an archive."""
    url = piece.file.url
    with open_raw(url) as raw:
        kind = compression_of(raw.read(HEAD_BYTES))
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
    url, size = piece.file.url, piece.file.size
    stop = None if stream.stream is not raw else piece.stop
    try:
        yield from _records(stream, url, limit, stop)
    except (Damaged, _TooLarge) as error:
        sound = stream.sound(0) if stream.stream is not raw else stream.whole
        where = f"{url}, byte {sound}"
        if isinstance(error, _TooLarge):
            yield too_large(where, limit)
        why = str(error) or "what follows it is not read"
        yield Skipped("damaged", where, why, lost=max(0, size - sound), records=0 if stream.counted else 1)


def _members(raw: BinaryIO, piece: Piece, limit: int) -> Iterator[Found]:
    """The records of the gzip members that begin in the piece, with those that hold the rest of their last record."""
    url, size = piece.file.url, piece.file.size
    # Blanks in front of a record may be the end of another one, so readers divide the file where there are none.
    position: int | None = _next_member(raw, piece.start, BLANKS if piece.start == 0 else b"")
    if piece.start == 0 and position != 0:
        yield Skipped("damaged", f"{url}, byte 0", "no WARC record at the beginning", lost=position or size)
    while position is not None:
        if piece.stop is not None and position >= piece.stop and (_head(raw, position) or b"").startswith(b"WARC/"):
            return
        where = f"{url}, byte {position}"
        raw.seek(position)
        stream = _Members(raw)
        end: int | None
        try:
            yield from _records(stream, where, limit, None)
            end = stream.stream.tell()
        except Damaged as error:
            sound = stream.sound(position)
            end = _next_member(raw, position + 1)
            lost = max(0, (size if end is None else end) - sound)
            yield Skipped("damaged", where, str(error), lost, records=0 if stream.counted else 1)
        except _TooLarge:
            yield too_large(where, limit)
            end = _next_member(raw, position + 1)
        if end is None or end >= size:
            return
        position = _next_member(raw, end)
        if position != end:
            after = size if position is None else position
            head = _head(raw, end)
            raw.seek(end)
            if (head is None or head.strip()) and raw.read(min(after - end, BLOCK)).strip(b"\0"):
                yield Skipped("damaged", f"{url}, byte {end}", "no WARC record", lost=after - end)


def _next_member(raw: BinaryIO, position: int, blanks: bytes = BLANKS) -> int | None:
    """Where the first gzip member at or after `position` is that begins with a record, or blanks and one; None without."""
    while True:
        raw.seek(position)
        block = raw.read(BLOCK)
        if len(block) < len(MEMBER):
            return None
        found = block.find(MEMBER)
        while found >= 0:
            head = _head(raw, position + found) or b""
            if head.lstrip(blanks).startswith(b"WARC/"):
                return position + found
            found = block.find(MEMBER, found + 1)
        position += len(block) - len(MEMBER) + 1


def _head(raw: BinaryIO, position: int) -> bytes | None:
    """What the gzip member that begins there begins with; None where none does that can be read."""
    raw.seek(position)
    if raw.read(len(MEMBER)) != MEMBER:
        return None
    raw.seek(position)
    stream = Unpacked(raw, "gz")
    head = stream.peek(16)
    return head if head or not stream.broken else None


class _Buffer:
    """Lines and blocks from a stream. `offset` counts the bytes given out, `whole` those up to the last whole record."""

    def __init__(self, stream: Any, offset: int):
        self.stream, self.offset = stream, offset
        self.whole = offset
        self.counted = False
        """Whether the damage at which reading stands was counted."""
        self.between = False
        """Whether more is read to see if there is another record, not because one has not ended."""
        self._data = b""

    def sound(self, begin: int) -> int:
        """About where in the compressed file, in which the stream begins at `begin`, the last whole record ends."""
        read = self.offset + len(self._data)
        return begin + (self.stream.tell() - begin) * self.whole // max(read, 1)

    def line(self) -> bytes:
        """The next line with its newline. Raises _BadHeader for one of unlikely length, Damaged at the end."""
        while (end := self._data.find(b"\n")) < 0:
            if len(self._data) > LONGEST_LINE:
                raise _BadHeader("a line without end")
            block = self.stream.read(BLOCK)
            if not block:
                raise Damaged("the file ends in the middle of a WARC header")
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
        while len(self._data) < size:
            self.between = not self._data.strip()
            block = self.stream.read(BLOCK)
            self.between = False
            if not block:
                break
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

    def put_back(self, data: bytes) -> None:
        """The next bytes are these, which `take` gave last."""
        self._data = data + self._data
        self.offset -= len(data)

    def _give(self, size: int) -> bytes:
        piece, self._data = self._data[:size], self._data[size:]
        self.offset += len(piece)
        return piece


class _Members(_Buffer):
    """A gzip member that begins with a record, and those behind it that hold the rest of its last one."""

    def __init__(self, raw: BinaryIO):
        super().__init__(Unpacked(raw, "gz", self._goes_on), 0)
        self._raw = raw

    def _goes_on(self, position: int) -> bool:
        head = _head(self._raw, position)
        if head is None or (head and head[:5] == b"WARC/"[: len(head)]):
            return False
        return not self.between or head[:1] in BLANKS


def _records(stream: _Buffer, where: str, limit: int, stop: int | None) -> Iterator[Found]:
    """The articles of the records of one stream that begin before `stop`. Damaged headers cost their record only."""
    # From within a file, reading begins in the middle of a record, which is another reader's.
    lost_way = stream.offset > 0
    while head := stream.peek(5):
        begin = stream.offset
        if stop is not None and begin >= stop:
            return
        if blank := len(head) - len(head.lstrip()):
            stream.skip(blank)
            continue
        if not head.startswith(b"WARC/"):
            if not lost_way:
                yield Skipped("damaged", f"{where}, byte {begin} of its text", "no WARC record where one should begin")
                lost_way = stream.counted = True
            if not stream.past_line():
                return
            continue
        try:
            headers = _headers(stream)
            kind, length = headers.get("warc-type"), headers.get("content-length")
            if kind is None or length is None:
                raise _BadHeader(f"no {'WARC-Type' if kind is None else 'Content-Length'}")
            if not re.fullmatch("[0-9]{1,18}", length):
                raise _BadHeader(f"its Content-Length is {length[:60]!r}")
        except _BadHeader as error:
            if not lost_way:
                yield Skipped("damaged", where, f"bad WARC header: {error}")
                stream.counted = True
            lost_way = True
            continue
        lost_way = stream.counted = False
        yield from _record(stream, headers, kind, int(length), where, limit)
        stream.whole = stream.offset


def _record(
    stream: _Buffer, headers: dict[str, str], kind: str, length: int, where: str, limit: int
) -> Iterator[Found]:
    """What one record gives. Leaves the stream behind its content."""
    if headers.get("warc-target-uri"):
        where = f"{where} ({headers['warc-target-uri'][:200]})"
    wanted = kind in ("response", "conversion", "resource")
    if not wanted or length > limit:
        if length > PATIENCE * limit:
            raise _TooLarge
        skipped = stream.skip(length)
        if skipped < length:
            raise Damaged("the file ends in the middle of a record")
        yield too_large(where, limit) if wanted else Skipped("not_an_article", where, f"a record of type {kind[:40]}")
        return
    content = stream.take(length)
    if not (len(content) == length and _is_followed(stream)):
        # A Content-Length that is too large must not cost the records that it reaches into.
        if (next_record := content.find(b"\n" + RECORD)) >= 0:
            stream.put_back(content[next_record + 1 :])
            yield Skipped("damaged", where, "its Content-Length is not the length of its content")
            return
        if len(content) < length:
            raise Damaged("the file ends in the middle of a record")
    try:
        yield _article(headers, kind, content, where, limit)
    except OverflowError:
        yield too_large(where, limit)
    except Damaged as error:
        yield Skipped("damaged", where, str(error))


def _is_followed(stream: _Buffer) -> bool:
    """Whether a record ends here: another one follows, or nothing. Raises Mismatch where its checksum differs."""
    try:
        return stream.peek(9).lstrip(b"\r\n")[:5] in (b"WARC/", b"")
    except Mismatch:
        raise
    except Damaged:
        # Of what follows: whoever reads it meets it again.
        return True


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
    raise _BadHeader(f"more than {MOST_HEADERS} lines")


def _article(headers: dict[str, str], kind: str, content: bytes, where: str, limit: int) -> Found:
    """The text of a page. Raises Damaged where its body is broken, OverflowError where it unpacks to too much."""
    if kind == "conversion":
        return article(page_text(content, headers.get("content-type", ""), "utf-8"), where)
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
        return article(page_text(content, charset), where)
    if media not in HTML:
        return Skipped("not_an_article", where, f"not a page but {media[:60] or 'of unknown type'}")
    text = extract(page_text(content, charset))
    return Skipped("not_an_article", where, "a page without an article") if text is None else article(text, where)


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
    # Not chunked after all, damaged or cut short: what is there is taken as it is.
    return b"".join([*parts, body[position:]])
