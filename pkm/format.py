"""Numbers, times and tables as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def printable(text: str) -> str:
    """A name, or text with names in it, for a terminal, a log or a JSON file: `caf\\xe9` where its bytes are no UTF-8.

    Control characters other than newlines and tabs are escaped, too.
    """
    if text.isprintable():
        return text
    pieces = []
    for character in text:
        if "\udc80" <= character <= "\udcff":
            # How Python holds a byte of a name that it cannot decode.
            character = f"\\x{ord(character) - 0xDC00:02x}"
        elif (
            "\ud800" <= character <= "\udfff"
            or (ord(character) < 32 and character not in "\n\t")
            or character == "\x7f"
        ):
            character = ascii(character)[1:-1]
        pieces.append(character)
    return "".join(pieces)


def duration(seconds: float) -> str:
    """3725.0 -> `1:02:05`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def amount(number: int) -> str:
    """12_345_678 -> `12.3 M`."""
    return _scaled(number, 1000, ("", " k", " M", " G", " T", " P"))


def size(number: int) -> str:
    """Bytes -> `1.5 GiB`."""
    return _scaled(number, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(number: int, base: int, units: tuple[str, ...]) -> str:
    value, unit = float(number), 0
    while value >= 999.5 and unit < len(units) - 1:
        value, unit = value / base, unit + 1
    digits = f"{value:.0f}" if unit == 0 or value >= 99.95 else f"{value:.1f}"
    return digits + units[unit]


def roughly(seconds: float) -> str:
    """5000 -> `1.4 h`."""
    for size, unit in ((365 * 86400, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size or (unit == "h" and seconds >= size):
            return f"{seconds / size:.0f} {unit}" if seconds >= 10 * size else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def decimals(number: float, digits: int) -> str:
    """1234.5678 -> `1,234.57`; from 10^9 on three digits and an exponent."""
    return f"{number:,.{digits}f}" if abs(number) < 1e9 else f"{number:.3g}"


LARGEST_PERPLEXITY = 1e300
"""One beyond it is None, and its logarithm stands beside it: a number of 64 bits ends soon after."""


def perplexity(value: float | None, log: float | None, digits: int = 2) -> str:
    """As text: of one that no number holds, `exp(1234.5)` by its logarithm."""
    if value is not None:
        return decimals(value, digits)
    return f"> {LARGEST_PERPLEXITY:.0e}".replace("+", "") if log is None else f"exp({log:,.1f})"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns line up when read as plain text."""
    body = [list(row) for row in rows]
    widths = [max(3, *(len(row[i]) for row in [list(header), *body])) for i in range(len(header))]
    lines = [_line(header, widths), "|" + "|".join("-" * (width + 2) for width in widths) + "|"]
    return "\n".join(lines + [_line(row, widths) for row in body]) + "\n"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
