"""The Unicode classes the Moses scripts test for, as perl 5.36 (Unicode 14) defines them, whatever Python runs this.

Each constant is the inside of a regular-expression character class, as in `re.compile(f"[{ALPHA}]")`. Python's own
`\\w`, `\\d`, `\\s` and `str.isalpha` differ: they follow another Unicode version, and `\\s` takes four control
characters (U+001C to U+001F) for spaces. The code points are in perl_classes.txt.
"""

from __future__ import annotations

from pathlib import Path

_SECTIONS = Path(__file__).with_suffix(".txt").read_text(encoding="ascii").split("\n[")[1:]
_CODE_POINTS = dict(section.split("]", 1) for section in _SECTIONS)
"""Lists of hexadecimal ranges, such as "30-39 AA", by name."""


def _ranges(*names: str) -> list[tuple[int, int]]:
    """(first, last) code points of lists, in order; those that touch are joined."""
    pairs = [[int(end, 16) for end in item.split("-")] for name in names for item in _CODE_POINTS[name].split()]
    joined: list[tuple[int, int]] = []
    for first, *rest in sorted(pairs):
        begins = joined.pop()[0] if joined and joined[-1][1] + 1 == first else first
        joined.append((begins, rest[0] if rest else first))
    return joined


def _class_body(*names: str) -> str:
    """The inside of a character class that holds every code point of the lists."""
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in _ranges(*names))


ALPHA = _class_body("alpha")
r"""`\p{IsAlpha}`: letters, letter numbers and the marks that Unicode calls alphabetic."""

DIGIT = _class_body("digit")
r"""`\d` and `\p{Nd}`: decimal digits of every script."""

ALNUM = _class_body("alpha", "digit")
r"""`\p{IsAlnum}`."""

NUMBER = _class_body("digit", "other_number")
r"""`\p{IsN}`: digits, fractions, roman and circled numerals."""

LOWER = _class_body("lower")
r"""`\p{IsLower}`."""

OTHER = _class_body("other_c")
r"""`\p{C}`: control, format, unassigned, private-use and surrogate code points."""

SPACE = _class_body("space")
r"""`\s`."""

CURRENCY = _class_body("currency")
r"""`\p{Sc}`."""

SPACE_CHARACTERS = frozenset(chr(i) for first, last in _ranges("space") for i in range(first, last + 1))
