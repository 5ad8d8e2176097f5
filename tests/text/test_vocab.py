import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.errors import UserError
from pkm.text.bpe import count_pieces, count_words, learn
from pkm.text.moses import tokenize
from pkm.text.vocab import SPECIALS, UNK_ID, Vocab, may_be_a_piece


def test_ids_are_specials_then_the_files_lines(tmp_path):
    (tmp_path / "vocab").write_text("the 10\nqu@@ 3\nick 2\n")
    vocab = Vocab.load(tmp_path / "vocab")
    assert vocab.pieces[:4] == ["<s>", "</s>", "<pad>", "<unk>"]
    assert [vocab.id(piece) for piece in ("the", "qu@@", "ick")] == [14, 15, 16]
    assert vocab.size == 17 and vocab.first == 14
    assert vocab.id("other") == UNK_ID
    assert "the" in vocab and "other" not in vocab and "</s>" not in vocab


def test_word_ends_are_pieces_without_continuation_and_the_unknown():
    vocab = Vocab(["the", "qu@@", "ick", "@@"], [4, 3, 2, 1])
    assert [vocab.pieces[i] for i in vocab.word_ends.nonzero()[0]] == ["<unk>", "the", "ick"]


def test_named_specials_shift_the_pieces():
    vocab = Vocab(["the"], [1], specials=("<ask>", "<tell>"))
    assert vocab.id("<tell>") == 5 and vocab.id("the") == 6


def test_a_threshold_drops_rare_pieces_and_order_is_count_then_bytes():
    vocab = Vocab.from_counts({"b": 2, "a": 2, "é": 2, "z": 9, "rare": 1}, threshold=2)
    assert vocab.pieces[vocab.first :] == ["z", "a", "b", "é"]
    assert vocab.counts[vocab.first :] == [9, 2, 2, 2]


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("the 10\nquick\n", 2, "expected `piece count`"),
        ("the 10\nthe 9\n", 2, "is there already"),
        ("the -1\n", 1, "expected `piece count`"),
        ("the 10\n\nof 3\n", 2, "expected `piece count`"),
        ("<unk> 10\n", 1, "name of a special"),
    ],
)
def test_malformed_vocabularies_are_named_by_line(tmp_path, content, line, message):
    (tmp_path / "vocab").write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        Vocab.load(tmp_path / "vocab")
    assert f"vocab:{line}:" in str(caught.value)


def test_an_empty_vocabulary_and_a_folder_are_user_errors(tmp_path):
    (tmp_path / "vocab").write_text("")
    for path in (tmp_path / "vocab", tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError):
            Vocab.load(path)


def test_a_piece_given_twice_is_a_user_error():
    with pytest.raises(UserError, match="'the' comes twice"):
        Vocab(["the", "of", "the"], [3, 2, 1])


@given(
    st.lists(st.text("ab.,'`-<>|&;#[]@_ \u00e9", min_size=1, max_size=8), min_size=1, max_size=5),
    st.booleans(),
    st.integers(1, 40),
)
@settings(max_examples=500)
def test_no_piece_of_learned_subwords_has_a_name_that_none_may_have(lines, escape, merges):
    words = count_words([tokenize("\n".join(lines), escape)])
    if words:
        codes = learn(words, merges)
        assert all(may_be_a_piece(piece, escape) for piece in count_pieces(codes, words))


@pytest.mark.parametrize("name", (*SPECIALS, "<news>", "[SEP]", "<|end|>", "__date__"))
def test_marks_as_people_write_them_are_no_pieces(name):
    assert not may_be_a_piece(name, False) and not may_be_a_piece(name, True)
