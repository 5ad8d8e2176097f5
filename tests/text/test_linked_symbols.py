"""Long words: the same merges and the same pieces as short ones, at a cost that grows with the word and not its square."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.text import bpe, merges
from pkm.text.bpe import Codes, count_pieces, learn
from pkm.text.linked_symbols import LinkedSymbols

WORDS = st.dictionaries(st.text("abc", min_size=1, max_size=40), st.integers(1, 5), min_size=1, max_size=6)


def from_length(monkeypatch, length: int) -> None:
    """Words of more characters are taken for long ones."""
    monkeypatch.setattr(bpe, "LONG_WORD", length)
    monkeypatch.setattr(merges, "LONG_WORD", length)


@given(words=WORDS, others=WORDS, number=st.integers(1, 60), length=st.integers(0, 20))
@settings(max_examples=800)
def test_long_words_are_learned_from_and_split_as_short_ones_are(words, others, number, length):
    with pytest.MonkeyPatch.context() as patch:
        from_length(patch, 10**9)
        short = learn(words, number)
        pieces = {word: short.pieces(word) for word in (*words, *others)}
        limited = set(list(count_pieces(short, words))[::2])
        split = {word: short.pieces(word, limited) for word in (*words, *others)}
        from_length(patch, length)
        long = learn(words, number)
        assert (long.merges, long.counts) == (short.merges, short.counts)
        assert {word: long.pieces(word) for word in pieces} == pieces
        assert {word: long.pieces(word, limited) for word in pieces} == split


def test_codes_in_any_order_split_long_words_as_short_ones(monkeypatch):
    rng = random.Random(0)
    for _ in range(200):
        known, pairs = list("ab"), []
        for _ in range(12):
            left, right = rng.choice(known), rng.choice(known)
            if left + right not in known:
                known.append(left + right)
                pairs.append((left, right))
        rng.shuffle(pairs)
        codes = Codes(pairs, [1] * len(pairs))
        words = ["".join(rng.choices("ab", k=rng.randint(1, 60))) for _ in range(5)]
        from_length(monkeypatch, 10**9)
        expected = [codes.pieces(word) for word in words]
        from_length(monkeypatch, 0)
        assert [codes.pieces(word) for word in words] == expected


@pytest.mark.parametrize("letters", ["acgt", "a", "abcdefghijklmnopqrstuvwxyz0123456789"])
def test_a_word_of_300_000_characters_is_learned_from_and_split(letters):
    """In steps that look at the whole word this takes hours."""
    rng = random.Random(0)
    word = "".join(rng.choices(letters, k=300_000))
    codes = learn({word: 1, word[:300]: 3}, 200)
    pieces = codes.pieces(word)
    assert "".join(piece.removesuffix("@@") for piece in pieces) == word
    assert len(pieces) < 290_000


def test_a_piece_of_more_merges_than_functions_may_be_nested_is_split_to_its_characters():
    word = "".join(chr(0x4E00 + i) for i in range(3000))
    chain = [(word[:i], word[i] + ("</w>" if i == 2999 else "")) for i in range(1, 3000)]
    codes = Codes(chain, [1] * len(chain))
    assert codes.pieces(word) == [word]
    assert codes.pieces(word, {"x"}) == [*(character + "@@" for character in word[:-1]), word[-1]]


def test_a_joined_pair_leaves_its_neighbours_next_to_it():
    linked = LinkedSymbols(list("abcd"), "")
    assert linked.join(1, "bc") == (0, 3)
    assert linked.symbols == ["a", "bc", "", "d"]
    assert linked.holds(0, "a", "bc") and linked.holds(1, "bc", "d") and not linked.holds(2, "", "d")
    assert linked.join(1, "bcd") == (0, -1)
    assert linked.join(0, "abcd") == (-1, -1)
    assert not linked.holds(0, "abcd", "")
