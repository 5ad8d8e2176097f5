import re

import pytest

from pkm.text import perl_classes
from tests.text.goldens import golden

NAMES = {"Alnum": "ALNUM", "Alpha": "ALPHA", "Lower": "LOWER", "N": "NUMBER", "C": "OTHER", "Space": "SPACE"}
RANGES = dict(line.split(" ") for line in golden("moses")["perl-character-classes.txt"].splitlines())
CHARACTERS = "".join(map(chr, range(0x110000)))


@pytest.mark.parametrize("name", NAMES)
def test_a_class_holds_the_code_points_it_holds_in_perl(name):
    expected = set()
    for item in RANGES[name].split(","):
        first, last = item.split("-")
        expected.update(range(int(first, 16), int(last, 16) + 1))
    found = re.findall(f"[{getattr(perl_classes, NAMES[name])}]", CHARACTERS)
    assert set(map(ord, found)) == expected
    assert len(re.findall(f"[^{getattr(perl_classes, NAMES[name])}]", CHARACTERS)) == 0x110000 - len(expected)


def test_decimal_digits_are_numbers_and_alphanumeric_but_not_alphabetic():
    digits = set(re.findall(f"[{perl_classes.DIGIT}]", CHARACTERS))
    assert digits == {
        c
        for c in digits
        if re.match(f"(?=[{perl_classes.NUMBER}])(?=[{perl_classes.ALNUM}])[^{perl_classes.ALPHA}]", c)
    }
    assert len(digits) == 660  # Unicode 14


def test_currency_symbols_are_those_of_unicode_14():
    found = re.findall(f"[{perl_classes.CURRENCY}]", CHARACTERS)
    assert len(found) == 63
    assert {"$", "\u20ac", "\u00a3", "\u20c0"} <= set(found)
