"""Text that is not UTF-8: web pages as they declare themselves, and files that begin with a mark of UTF-16 or UTF-32.

A byte that does not fit becomes U+FFFD where it stands, and changes nothing about how the rest is read.
"""

from __future__ import annotations

import codecs
import re
from typing import Any

import webencodings

from pkm.prepare.input.buffered import Buffered

# UTF-16's mark is the beginning of UTF-32's.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
LABEL = r"""charset\s*=\s*["']?\s*([A-Za-z0-9_.:-]{2,40})"""
CHARSET = re.compile(LABEL, re.IGNORECASE)
# What a page says of itself: HTML's meta element, or XML's declaration.
OF_ITSELF = re.compile(
    (rf"<meta[^>]{{0,200}}{LABEL}" + r"""|^\s*<\?xml[^>]{0,100}encoding\s*=\s*["']([A-Za-z0-9_.:-]{2,40})""").encode(),
    re.IGNORECASE,
)


class Recoded(Buffered):
    """A stream of text in UTF-16 or UTF-32, with its mark, as UTF-8."""

    def __init__(self, stream: Any, encoding: str):
        super().__init__()
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")

    def tell(self) -> int:
        return self._stream.tell()

    def _more(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._ended = not data
        return self._decoder.decode(data, final=not data).encode("utf-8")


def marked_encoding(head: bytes) -> str | None:
    """The encoding that a text's first bytes declare by a mark; None for UTF-8, with or without one.

    Two damaged bytes in front of UTF-8 are no mark: UTF-16 has NUL bytes in it, or else is far from UTF-8.
    """
    encoding = next((encoding for mark, encoding in MARKS if head.startswith(mark)), None)
    if encoding is None or b"\0" in head:
        return encoding
    text = head[2:].decode("utf-8", "replace")
    return encoding if not text or 8 * text.count("\ufffd") > len(text) else None


def page_text(content: bytes, content_type: str, default: str = "cp1252") -> str:
    """A page as text: what its mark says, UTF-8 where it holds that, what it declares, or else `default`.

    content_type  HTTP's header, which goes before what the page says of itself (HTML standard, "determining the
                  character encoding"). Labels mean what they do on the web: ISO-8859-1 is Windows-1252, GB2312 is GB18030.
    """
    if encoding := marked_encoding(content):
        return content.decode(encoding, "replace")
    declared = _declared(content, content_type)
    if declared is not None and declared.name in ("utf-16le", "utf-16be", "iso-2022-jp"):
        # Their bytes pass for UTF-8.
        return _decode(content, declared)
    text = content.decode("utf-8", "replace").removeprefix("\ufeff")
    if declared is None or declared.name != "utf-8":
        # Other encodings hardly ever form what UTF-8 has for a character; UTF-8 with some damage mostly does.
        broken = text.count("\ufffd") - content.count("\ufffd".encode())
        if broken and broken > len(text) - len(text.encode("ascii", "ignore")) - broken:
            return content.decode(default, "replace") if declared is None else _decode(content, declared)
    return text


def _declared(content: bytes, content_type: str) -> Any:
    """The first encoding of those declared that there is; None without one."""
    header, page = CHARSET.search(content_type), OF_ITSELF.search(content[:4096])
    for label in (header[1] if header else "", (page[1] or page[2]).decode() if page else ""):
        found = webencodings.lookup(label)
        # What can be read as ASCII is not UTF-16, whatever it says.
        if found is not None and not (found.name.startswith("utf-16") and b"\0" not in content[:1024]):
            return found
    return None


def _decode(content: bytes, encoding: Any) -> str:
    # The web's GBK is GB18030, of which it is a part.
    codec = codecs.lookup("gb18030") if encoding.name == "gbk" else encoding.codec_info
    return codec.decode(content, "replace")[0]
