import logging
from collections import Counter
from itertools import pairwise

import pytest

from pkm.errors import UserError
from pkm.text.bpe import Applier, Codes, apply, characters, count_pieces, count_words, learn
from pkm.text.vocab import Vocab, format_counts, read_counts
from tests.text.goldens import golden


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    for name in ("codes10k", "vocab3000"):
        (folder / name).write_bytes(golden("bpe")[name].encode())
    return folder


@pytest.fixture(scope="module")
def codes(files):
    return Codes.load(files / "codes10k")


@pytest.mark.parametrize("kind", ["nasty", "sample"])
def test_pieces_are_what_fastbpe_prints(codes, kind):
    assert apply(codes, golden("bpe")[f"{kind}.tok"]) == golden("bpe")[f"{kind}.bpe"]


def test_pieces_outside_a_vocabulary_are_split_as_fastbpe_splits_them(codes, files):
    vocab = read_counts(files / "vocab3000")
    assert apply(codes, golden("bpe")["sample.tok"], vocab) == golden("bpe")["sample.bpe-vocab3000"]
    assert (
        apply(codes, golden("bpe")["sample.tok"], Vocab.load(files / "vocab3000"))
        == golden("bpe")["sample.bpe-vocab3000"]
    )


def test_codes_and_vocabulary_are_written_as_they_were_read(codes, files, tmp_path):
    codes.save(tmp_path / "codes")
    assert (tmp_path / "codes").read_bytes() == (files / "codes10k").read_bytes()
    Vocab.load(files / "vocab3000").save(tmp_path / "vocab")
    assert (tmp_path / "vocab").read_bytes() == (files / "vocab3000").read_bytes()


def test_the_vocabulary_of_a_text_is_what_fastbpe_prints():
    assert format_counts(count_words([golden("bpe")["sample.bpe"]])).decode() == golden("bpe")["sample.vocab"]


def test_pieces_counted_by_word_are_pieces_counted_in_the_text(codes):
    words = count_words([golden("bpe")["sample.tok"]])
    assert count_pieces(codes, words) == count_words([golden("bpe")["sample.bpe"]])


def test_merges_are_those_of_fastbpe_up_to_ties():
    learned = learn(count_words([golden("bpe")["sample.tok"]]), 300)
    theirs = [line.split(" ") for line in golden("bpe")["sample.codes300"].split("\n")[:-1]]
    ours = [[left, right, str(count)] for (left, right), count in zip(learned.merges, learned.counts, strict=True)]
    counts = Counter(learned.counts)
    first = next(i for i in range(300) if ours[i] != theirs[i])
    assert counts[learned.counts[first]] > 1, "the first difference must be a tie"
    assert [count for _, _, count in ours] == [count for _, _, count in theirs]
    assert len({*map(tuple, ours)} & {*map(tuple, theirs)}) >= 297


def brute_force_merges(words, number):
    """BPE by recounting every pair at every step; ties broken as the learner says: lowest symbol numbers first."""
    spelled = {word: characters(word) for word in words}
    frequency = Counter()
    for word, symbols in spelled.items():
        for symbol in symbols:
            frequency[symbol] += words[word]
    order = {s: i for i, s in enumerate(sorted(frequency, key=lambda s: (-frequency[s], s)))}
    found = []
    for _ in range(number):
        pairs = Counter()
        for word, symbols in spelled.items():
            for pair in pairwise(symbols):
                pairs[pair] += words[word]
        if not pairs:
            break
        left, right = min(pairs, key=lambda p: (-pairs[p], order[p[0]], order[p[1]]))
        found.append((left, right, pairs[left, right]))
        order[left + right] = len(order)
        for word, symbols in spelled.items():
            joined, i = [], 0
            while i < len(symbols):
                both = symbols[i : i + 2] == [left, right]
                joined.append(left + right if both else symbols[i])
                i += 2 if both else 1
            spelled[word] = joined
    return found


def test_merges_are_those_of_counting_every_pair_anew():
    words = count_words([" ".join(golden("bpe")["sample.tok"].split()[:400]), "aaaa aaa aa baaab xaaaaax aaaaaaa"])
    learned = learn(words, 300)
    assert list(zip(*zip(*learned.merges, strict=True), learned.counts, strict=True)) == brute_force_merges(words, 300)


def test_counts_beyond_32_bits_are_exact():
    learned = learn({"ab": 3_000_000_000, "abc": 5_000_000_000}, 2)
    assert learned.merges == [("b", "c</w>"), ("a", "bc</w>")] or learned.counts[0] == 5_000_000_000
    assert sum(learned.counts) == 10_000_000_000


def test_learning_stops_with_a_warning_where_no_pair_is_left(caplog):
    with caplog.at_level(logging.WARNING):
        learned = learn({"abc": 2}, 10)
    assert learned.merges == [("a", "b"), ("ab", "c</w>")]
    assert "only 2 of 10" in caplog.text


@pytest.mark.parametrize(
    ("word", "pieces"),
    [
        ("a\0bc", ["a\0bc</w>"]),
        ("xa\0bc", ["x", "a\0bc</w>"]),
        ("\0abc", ["\0abc</w>"]),
        ("\udc80\udc81a\udc82", ["\udc80\udc81", "a\udc82</w>"]),
        ("\udce2\udc82x", ["\udce2\udc82", "x</w>"]),
        ("\u200bé", ["\u200b", "é</w>"]),
        ("\ta", ["\t", "a</w>"]),
    ],
)
def test_characters_are_those_of_fastbpe_for_broken_bytes_and_nul(word, pieces):
    assert characters(word) == pieces


def test_spaces_and_newlines_stay_where_they_are(codes):
    assert apply(codes, "  the   the\n\n the \n") == "  the   the\n\n the \n"


def test_a_memory_of_one_word_changes_nothing(codes):
    applier = Applier(codes, remember=1)
    assert applier.apply(golden("bpe")["nasty.tok"]) == golden("bpe")["nasty.bpe"]


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("a b 1\na b\n", 2, "expected `left right count`"),
        ("#version: 0.2\na b\n", 1, "expected `left right count`"),
        ("a b 1\nc d x\n", 2, "expected `left right count`"),
        ("a b 3\nc d 2\na b 1\n", 3, "'ab' is made twice"),
        ("a b 3\n\n", 2, "expected `left right count`"),
    ],
)
def test_malformed_codes_are_named_by_line(tmp_path, content, line, message):
    (tmp_path / "codes").write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        Codes.load(tmp_path / "codes")
    assert f"codes:{line}:" in str(caught.value)


@pytest.mark.parametrize("content", [None, ""])
def test_absent_or_empty_codes_are_a_user_error(tmp_path, content):
    if content is not None:
        (tmp_path / "codes").write_text(content)
    with pytest.raises(UserError, match="codes"):
        Codes.load(tmp_path / "codes")


def test_codes_with_carriage_returns_load(tmp_path):
    (tmp_path / "codes").write_bytes(b"a b 3\r\nab c</w> 2\r\n")
    assert Codes.load(tmp_path / "codes").pieces("abc") == ["abc"]


def test_codes_learned_from_text_with_literal_end_marks_load(tmp_path):
    learn(count_words(["<w>do</w> do do</w>x do</w>y " * 3]), 50).save(tmp_path / "codes")
    assert len(Codes.load(tmp_path / "codes")) > 5
