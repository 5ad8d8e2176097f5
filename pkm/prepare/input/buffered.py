"""A stream of bytes that another one is turned into, piece by piece."""

from __future__ import annotations

from pkm.prepare.input.records import Damaged


class Buffered:
    """`read(n)` returns at most n bytes, b"" at the end; `peek(n)` the first n of what comes, fewer at the end.

    A subclass gives `_more`. Reading raises Damaged where what is below is broken, and from then on.
    """

    def __init__(self) -> None:
        self._output = memoryview(b"")
        self._ended = False
        self._broken: Damaged | None = None

    def read(self, size: int) -> bytes:
        while not self._output and not self._ended:
            self._output = memoryview(self._next(size))
        piece, self._output = self._output[:size], self._output[size:]
        return bytes(piece)

    def peek(self, size: int) -> bytes:
        """Damage is not raised yet: that is for whoever reads up to it."""
        try:
            while len(self._output) < size and not self._ended:
                self._output = memoryview(bytes(self._output) + self._next(size))
        except Damaged:
            pass
        return bytes(self._output[:size])

    @property
    def broken(self) -> bool:
        return self._broken is not None

    def tell(self) -> int:
        """Up to where in the file everything was read and can be used, in bytes as it lies there."""
        raise NotImplementedError

    def _more(self, size: int) -> bytes:
        """Some bytes, about `size`; b"" also where more has to be read first. Sets `_ended`, raises Damaged."""
        raise NotImplementedError

    def _next(self, size: int) -> bytes:
        if self._broken is not None:
            raise self._broken
        try:
            return self._more(size)
        except Damaged as error:
            self._broken = error
            raise
