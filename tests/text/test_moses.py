import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.text.chunks import document_keys, key_tokens, without_odd_spaces
from pkm.text.moses import Tokenizer, WordCounter, tokenize
from pkm.text.moses_rules import _mark_dots, tokenize_line, unmark_dots
from pkm.text.normalize import normalize_xlm
from tests.text.goldens import golden

KINDS = ("nasty", "news", "fuzz")

# What the rules look at, and what they must not be confused by.
PARTS = st.sampled_from(
    [*"aAzZéñÑßǅⅣª½²٣57.,'`-\"()[]&<>|@中😀", *" \t\u00a0\u3000\u2028\u2029\u0085\u200b\u00ad\ufeff", *"\0\1\2\3\4\5\6\x1c\x1f\x7f\r",
     "..", "...", "U.S", "Mr", "No", "pp", "St", "e.g", "'s", "' '", ", ", ". ", "DOTMULTI", "DOT", "word", "1990", "\n"]
)  # fmt: skip
TEXTS = st.lists(PARTS | st.characters(), max_size=30).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("printed", "options"),
    [("no-escape", {}), ("escape", {"escape": True}), ("xlm", {"normalize": "xlm"})],
    ids=["no-escape", "escape", "xlm"],
)
def test_tokens_are_what_the_perl_scripts_print(kind, printed, options):
    files = golden("moses")
    assert tokenize(files[f"{kind}.txt"], **options) == files[f"{kind}.{printed}"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_line_rules_alone_print_the_same(kind):
    files = golden("moses")
    lines = files[f"{kind}.txt"].split("\n")
    assert [tokenize_line(line) for line in lines] == files[f"{kind}.no-escape"].split("\n")


@given(TEXTS, st.booleans())
@settings(max_examples=1500, deadline=None)
def test_remembered_chunks_give_the_tokens_of_whole_lines(text, escape):
    lines = text.split("\n")
    assert Tokenizer(escape).text(text).split("\n") == [tokenize_line(line, escape) for line in lines]


@given(TEXTS)
@settings(max_examples=1000, deadline=None)
def test_a_document_is_its_lines_that_hold_a_token(text):
    expected = [words for line in text.split("\n") if (words := tokenize_line(line).split())]
    found, line = [], []
    for key in document_keys(text):
        if key == "\n":
            found.append(line)
            line = []
        else:
            line += [word for word in key_tokens(key, False).split(" ") if word]
    assert found == expected and not line


def lines_of_tokens(text):
    return [words for line in text.split("\n") if (words := tokenize_line(line).split())]


@given(TEXTS)
@settings(max_examples=500, deadline=None)
def test_without_odd_spaces_a_text_has_the_tokens_it_had_and_nothing_more_to_take_away(text):
    plain = without_odd_spaces(text)
    assert lines_of_tokens(plain) == lines_of_tokens(text)
    assert without_odd_spaces(plain) == plain


SPACED = st.lists(st.sampled_from([*"ab", *" \t\n\r\u00a0\u2028\x0b\x0c\0\x1f", "\r\n", " \n "]), max_size=12).map(
    "".join
)


@given(SPACED, SPACED)
@settings(max_examples=1000, deadline=None)
def test_texts_of_words_are_equal_without_odd_spaces_if_and_only_if_their_tokens_are(one, other):
    same = without_odd_spaces(one) == without_odd_spaces(other)
    assert same == (lines_of_tokens(one) == lines_of_tokens(other))


@given(TEXTS)
@settings(max_examples=500, deadline=None)
def test_normalising_many_lines_is_normalising_each(text):
    assert normalize_xlm(text).split("\n") == [normalize_xlm(line) for line in text.split("\n")]


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("No. 5 and Corp. 5", "No. 5 and Corp. 5"),
        ("see p. 5", "see p . 5"),
        ("in the U.S.", "in the U.S ."),
        ("word. ñandú", "word. ñandú"),
        ("word. Ñandú", "word . Ñandú"),
        ("one\u2028two\u0085three", "one two three"),
        ("nul\0byte", "nulbyte"),
        ("unit\x1fseparator", "unitseparator"),
        ("end.'", "end . ' "),
        ("", ""),
        (" \t ", " \t "),
        ("\0", ""),
    ],
)
def test_traps_of_the_rules(line, tokens):
    assert tokenize(line) == tokens


def test_a_memory_of_two_chunks_changes_nothing():
    files = golden("moses")
    assert Tokenizer(remember=2).text(files["news.txt"]) == files["news.no-escape"]


@pytest.mark.parametrize("normalize", [None, "xlm"])
def test_word_counts_are_those_of_the_tokens(normalize):
    text = golden("moses")["fuzz.txt"]
    counter = WordCounter(normalize=normalize, remember=500)
    for document in text.split("\n\n"):
        counter.add(document)
    expected: dict[str, int] = {}
    for word in tokenize(text, normalize=normalize).split():
        expected[word] = expected.get(word, 0) + 1
    assert dict(counter.words()) == expected


def test_long_lines_that_are_one_key_are_not_remembered():
    tokenizer = Tokenizer()
    for i in range(100):
        tokenizer.text(f"a line with a control character \0 and a number {i} that is longer than a word")
    assert len(tokenizer._tokens) == 0


def marked_round_by_round(text):
    """How the script moves dots: one of every mark a round."""
    while "DOTMULTI." in text:
        text = re.sub(r"DOTMULTI\.([^.])", r"DOTDOTMULTI \1", text)
        text = text.replace("DOTMULTI.", "DOTDOTMULTI")
    return text


def unmarked_round_by_round(text):
    while "DOTDOTMULTI" in text:
        text = text.replace("DOTDOTMULTI", "DOTMULTI.")
    return text.replace("DOTMULTI", ".")


DOTS = st.lists(
    st.sampled_from([".", "..", "....", "DOTMULTI", "DOTMULTI.", "DOT", "MULTI", "D", "a", " "]), max_size=14
).map("".join)


@given(DOTS)
@settings(max_examples=3000, deadline=None)
def test_all_dots_are_moved_at_once_as_if_in_rounds(text):
    assert _mark_dots(text) == marked_round_by_round(text)
    assert unmark_dots(text) == unmarked_round_by_round(text)


@pytest.mark.parametrize(
    "part", [".", "DOTMULTI.", "DOT", "DOTMULTI", ". ", ".,", "'", "' ' ", "\0.", "\u00a0", '",', "( "]
)
def test_runs_of_a_million_characters_are_tokenized_part_by_part(part):
    """Anything that looked at the whole for every part of it would take hours."""
    times = 1_000_000 // len(part)
    whole = tokenize(f"a {part * times} b", normalize="xlm")
    few = tokenize(f"a {part * 8} b", normalize="xlm")
    assert len(set(whole.split())) <= len(set(few.split()))
    assert whole.startswith("a") and whole.endswith("b")


def test_a_run_of_dots_is_one_token():
    assert tokenize("a " + "." * 1_000_000 + " b") == "a " + "." * 1_000_000 + " b"
