"""JSON that is not an object a line: an array of objects, or objects over several lines."""

from __future__ import annotations

import re
from typing import Any

from pkm.prepare.input.buffered import Buffered
from pkm.prepare.input.records import Damaged

OUTSIDE, INSIDE = re.compile(rb'["{}\[\]\n]'), re.compile(rb'["\\\n]')
BETWEEN = bytes.maketrans(b"\r,", b"\n\n")


def holds_values(head: bytes) -> bool:
    """Whether a file that begins like this has its objects in an array, or over several lines."""
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return head.startswith(b"[") or head.partition(b"\n")[0].strip() == b"{"


class OneALine(Buffered):
    """Rewrites such a stream as an object a line, without reading into the objects, so that damage costs its own only.

    What stands between objects and is neither white space nor a comma or bracket becomes lines too, which are no objects.
    Newlines within an object become tabs: white space as good as any outside of strings, and inside as wrong as they are.
    """

    def __init__(self, stream: Any):
        super().__init__()
        self._stream = stream
        self._objects = self._arrays = self._outer = 0
        """Open ones: braces, brackets within the outermost of these, brackets around them."""
        self._in_string = self._escaped = False
        # Blanks since the last newline, None where something else stood there; how many there are before an object.
        self._indent: int | None = 0
        self._first_indent: int | None = None
        # Whether what is within objects is not indented, so that lines within may begin like those of objects.
        self._flat = False
        self._read = self._whole = 0

    def tell(self) -> int:
        # Of what was read, the part up to the last object that came to its end.
        return self._stream.tell() * self._whole // max(self._read, 1)

    def _more(self, size: int) -> bytes:
        block = self._stream.read(size)
        self._ended = not block
        if self._ended and (self._objects or self._outer > 0):
            raise Damaged(f"the file ends in the middle of an {'object' if self._objects else 'array'}")
        output = bytearray()
        position = 0
        while position < len(block):
            if self._escaped:
                self._escaped = False
                if block[position] != 0x0A:
                    output.append(block[position])
                    position += 1
                    continue
            found = (INSIDE if self._in_string else OUTSIDE).search(block, position)
            end = found.start() if found else len(block)
            self._pass_over(block[position:end], output)
            position = end + 1
            if found:
                self._token(found[0], output)
                if not self._objects:
                    self._whole = self._read + position
        self._read += len(block)
        return bytes(output)

    def _pass_over(self, gap: bytes, output: bytearray) -> None:
        if not self._in_string:
            self._indent = None if gap.strip() or self._indent is None else self._indent + len(gap)
            gap = gap if self._objects else gap.translate(BETWEEN)
        output += gap

    def _token(self, token: bytes, output: bytearray) -> None:
        if token == b"\n":
            # No string goes on in the next line: one that seems to has lost its end.
            self._in_string, self._indent = False, 0
            output += b"\t" if self._objects else b"\n"
            return
        if token == b"{" and not self._in_string:
            self._open(output)
        elif token in b"[]" and not self._objects:
            output += b"\n"
            self._outer += 1 if token == b"[" else -1
        else:
            output += token
        if token == b'"':
            self._flat |= self._indent is not None and self._indent == self._first_indent and self._objects == 1
            self._in_string = not self._in_string
        elif token == b"\\":
            self._escaped = True
        elif token == b"}" and self._objects:
            self._objects -= 1
            if not self._objects:
                self._arrays = 0
                output += b"\n"
        elif token in b"[]" and self._objects:
            self._arrays += 1 if token == b"[" else -1
        self._indent = None

    def _open(self, output: bytearray) -> None:
        begins = self._indent is not None and self._indent == self._first_indent
        lost = self._objects and begins and not (self._arrays and self._flat)
        if lost or not self._objects:
            # An object whose end is missing ends where the next one begins on a line like the first one's.
            output += b"\n"
            self._objects = self._arrays = 0
            self._first_indent = self._indent if self._first_indent is None else self._first_indent
        self._objects += 1
        output += b"{"
