"""pkm/prepare/filters.py: the language is told by words, wherever they begin."""

from __future__ import annotations

import pytest

from pkm.prepare.filters import Filter, sample
from pkm.prepare.settings import Filters

ENGLISH = "The minister said on Monday that the talks with the bank had not yet ended, and that rates would rise. "
GERMAN = "Der Minister sagte am Montag, die Verhandlungen mit der Bank seien noch nicht abgeschlossen. "
IN_FRONT = {
    "newlines": "\n" * 2100,
    "blank space": " \t\u00a0\u3000" * 600,
    "zero-width spaces": "\u200b" * 2100,
    "byte order marks and joiners": "\ufeff\u2060\u200d" * 900,
    "a rule": "-" * 2100 + "\n",
    "rules": ("-" * 70 + "\n") * 40,
    "broken rules": "- = * _ . ~ " * 300,
    "box drawing": "\u2500\u2502\u2588" * 800,
    "numbers": " ".join(str(number) for number in range(900)),
    "emoji": "\U0001f600 " * 1500,
    "dots": "." * 100_000,
    "NUL": "\0" * 2100,
}


@pytest.fixture(scope="module")
def judge():
    return Filter(Filters(language="en"))


@pytest.mark.parametrize("front", IN_FRONT.values(), ids=IN_FRONT)
def test_what_stands_in_front_of_the_words_does_not_tell_the_language(judge, front):
    for text, reason in ((ENGLISH * 3, None), (GERMAN * 3, "language")):
        for with_it in (front + text, text[:40] + front + text[40:], front + text + front):
            assert judge.reason_to_drop(with_it, len(with_it.split())) == reason


def test_a_text_without_long_runs_is_sampled_from_its_beginning():
    text = "One, two (three) -- 1,234,567 and 'four'!\n\n" * 100
    for characters in (5, 300, 2000, 10_000):
        assert sample(text, characters) == text[:characters]


def test_runs_without_letters_count_for_one_character():
    assert sample("-" * 50 + "one" + "\n" * 2000 + "two", 300) == "one two"
    assert sample("one" + " " * 30 + "two" + "=" * 30, 6) == "one tw"
    assert sample("12 " * 100, 5) == "12 12"
    assert sample("", 5) == ""
