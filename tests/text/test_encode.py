from array import array
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.errors import UserError
from pkm.text.bpe import Codes, apply
from pkm.text.encode import Encoder
from pkm.text.moses import tokenize
from pkm.text.vocab import EOS_ID, UNK_ID, Vocab
from tests.text.goldens import golden
from tests.text.test_moses import TEXTS

ENCODERS = {}


@cache
def model(small: bool = False) -> tuple[Codes, Vocab]:
    lines = [line.split(" ") for line in golden("bpe")["codes10k"].split("\n")[:-1]]
    codes = Codes([(left, right) for left, right, _ in lines], [int(count) for _, _, count in lines])
    name = "vocab3000" if small else "sample.vocab"
    pairs = [line.rsplit(" ", 1) for line in golden("bpe")[name].split("\n")[:-1]]
    return codes, Vocab([piece for piece, _ in pairs], [int(count) for _, count in pairs])


def encoder(**options) -> Encoder:
    """Encoders are kept between tests, as they are between documents."""
    key = tuple(sorted(options.items()))
    if key not in ENCODERS:
        small = options.pop("small", False)
        ENCODERS[key] = Encoder(*model(small), cache_megabytes=8, **options)
    return ENCODERS[key]


def slow_ids(text: str, codes: Codes, vocab: Vocab, escape: bool = False, normalize=None) -> tuple[list[int], int]:
    """The chain of programs: Moses line by line, applybpe with the vocabulary, look-up."""
    ids, words = [], 0
    for line in tokenize(text, escape, normalize).split("\n"):
        tokens = line.split()
        if tokens:
            words += len(tokens)
            ids += [vocab.id(piece) for piece in apply(codes, " ".join(tokens), vocab).split(" ")] + [EOS_ID]
    return ids, words


@pytest.mark.parametrize("options", [{}, {"small": True}, {"escape": True}, {"normalize": "xlm"}], ids=str)
@pytest.mark.parametrize("kind", ["nasty", "news", "fuzz"])
def test_ids_are_those_of_the_chain_of_programs(kind, options):
    text = golden("moses")[f"{kind}.txt"]
    ids = array("H")
    words = encoder(**options).encode(text, ids)
    rest = {key: value for key, value in options.items() if key != "small"}
    expected, expected_words = slow_ids(text, *model(options.get("small", False)), **rest)
    assert ids.tolist() == expected
    assert words == expected_words


@given(TEXTS)
@settings(max_examples=500, deadline=None)
def test_ids_from_memory_are_those_of_the_chain_of_programs(text):
    ids = array("I")
    words = encoder(small=True).encode(text, ids)
    assert (ids.tolist(), words) == slow_ids(text, *model(small=True))


CLAUSES = st.lists(st.sampled_from(["the", "new", "said", "people", "Trump's", "year", "2016", "isn't"]), min_size=1)


@given(st.lists(CLAUSES, min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_sentences_of_known_words_come_back_from_their_ids(clauses):
    text = ", ".join(map(" ".join, clauses)) + ".\n"
    ids = array("H")
    encoder().encode(text, ids)
    assert UNK_ID not in ids
    assert encoder().decode(ids) == text


def test_ordinary_text_comes_back_from_its_ids():
    text = "Mr. Smith's dog isn't here, he said.\nIt costs $5.00 (or so).\n"
    ids = array("H")
    encoder().encode(text, ids)
    assert UNK_ID not in ids
    assert encoder().decode(ids) == text
    assert encoder().decode(np.asarray(ids)) == text


def test_decoding_leaves_out_specials_and_ends_an_open_line():
    the = encoder().vocab.id("the")
    assert encoder().decode([0, the, 2, the, 7, EOS_ID, the]) == "the the\nthe"
    assert encoder().decode([]) == ""


def test_blank_lines_and_lines_of_deleted_characters_give_nothing():
    ids = array("H")
    assert encoder().encode(" \n\n\t\n\0\x1c\n\u2028", ids) == 0
    assert not ids


def test_an_unknown_inner_piece_is_one_id_and_no_word_of_its_own():
    vocab = Vocab(["a", "b"], [2, 1])
    ids = array("H")
    words = Encoder(Codes([("x", "y")], [1]), vocab).encode("a qqb b q", ids)
    assert ids.tolist() == [14, UNK_ID, UNK_ID, 15, 15, UNK_ID, EOS_ID]
    assert words == 4


@pytest.mark.parametrize("typecode", "HIiLqQ")
def test_any_array_that_holds_the_ids_takes_them(typecode):
    ids = array(typecode)
    encoder().encode("the quick dog", ids)
    expected = array("H")
    encoder().encode("the quick dog", expected)
    assert ids.tolist() == expected.tolist()


def test_a_vocabulary_beyond_16_bits_keeps_its_ids():
    pieces = ["the", *(f"p{i}" for i in range(70_000))]
    ids = array("I")
    Encoder(Codes([("t", "h")], [1]), Vocab([*pieces[1:], "z"], [1] * 70_001)).encode("z", ids)
    assert ids.tolist() == [70_014, EOS_ID]


def test_a_full_memory_changes_nothing_and_stays_bounded():
    small = Encoder(*model(), cache_megabytes=1)
    first, second = array("H"), array("H")
    text = golden("moses")["news.txt"]
    for out in (first, second):
        for line in text.split("\n"):
            small.encode(line, out)
    assert first == second
    capacity = 1_000_000 // 256
    assert small.remembered() <= capacity


def test_unknown_settings_are_user_errors():
    for options in ({"backend": "spacy"}, {"normalize": "nfc"}, {"cache_megabytes": 0}):
        with pytest.raises(UserError):
            Encoder(*model(), **options)


def test_the_fastbpe_backend_gives_the_same_ids():
    pytest.importorskip("fastBPE")
    text = golden("moses")["news.txt"][:20_000]
    ours, theirs = array("H"), array("H")
    assert encoder().encode(text, ours) == Encoder(*model(), backend="fastbpe").encode(text, theirs)
    assert ours == theirs


def test_the_sacremoses_backend_gives_the_same_ids_for_ordinary_text():
    pytest.importorskip("sacremoses")
    text = "Mr. Smith's dog isn't here, he said.\n\nIt costs $5.00 (or so).\n"
    ours, theirs = array("H"), array("H")
    assert encoder().encode(text, ours) == Encoder(*model(), backend="sacremoses").encode(text, theirs)
    assert ours == theirs


@pytest.mark.parametrize("library", ["sacremoses", "fastbpe"])
def test_a_backend_that_is_not_installed_is_a_user_error(monkeypatch, library):
    name = {"sacremoses": "sacremoses", "fastbpe": "fastBPE"}[library]
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(UserError, match="not installed"):
        Encoder(*model(), backend=library)
