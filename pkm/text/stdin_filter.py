"""Text programs as filters over bytes: standard input to standard output, whole lines at a time."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator

from pkm.errors import UserError

_BLOCK_BYTES = 1 << 16


def run_filter(transform: Callable[[str], str], errors: str = "strict") -> None:
    """Write transform(lines) for every block of whole lines; a last line without its newline gets one.

    Lines end at newline characters and nowhere else. Raises UserError for a line that is not UTF-8 if errors is
    "strict"; with "surrogateescape" such bytes pass through.
    """
    dies_with_its_reader()
    output = sys.stdout.buffer
    for text in read_blocks(errors):
        ends = text.endswith("\n")
        output.write(transform(text.removesuffix("\n")).encode("utf-8", errors))
        output.write(b"\n")
        if not ends:
            break
    output.flush()


def read_blocks(errors: str = "strict") -> Iterator[str]:
    """Standard input in blocks of whole lines."""
    number = 1
    while lines := sys.stdin.buffer.readlines(_BLOCK_BYTES):
        try:
            yield b"".join(lines).decode("utf-8", errors)
        except UnicodeDecodeError:
            raise _not_utf8(lines, number) from None
        number += len(lines)


def dies_with_its_reader() -> None:
    """End quietly, as other filters do, when the reader of standard output goes away (`| head`)."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _not_utf8(lines: list[bytes], number: int) -> UserError:
    for offset, line in enumerate(lines):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            what = f"byte {error.start + 1} of the line, 0x{line[error.start]:02x}, is not UTF-8 ({error.reason})"
            fix = "convert the text to UTF-8 first, for example with iconv -f latin1 -t utf-8"
            return UserError(what, f"standard input:{number + offset}", fix)
    raise AssertionError("every line decodes")
