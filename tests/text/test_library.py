"""pkm/text/library.py: the ids are the library's own."""

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pkm.errors import UserError
from pkm.text import library
from pkm.text.library import LibraryEncoder, learn_byte_level
from pkm.text.library_chunks import PATTERNS, cuts_before_spaces
from tests.support.tokenizer_files import END, changed, tokenizer_file
from tests.text.goldens import golden

ENDS = {"byte-level": END, "metaspace": "</s>", "wordpiece": "[SEP]"}
TEXTS = ("news.txt", "fuzz.txt", "nasty.txt")


@pytest.fixture(params=ENDS)
def kind(request):
    return request.param


@pytest.fixture
def encoder(kind):
    return LibraryEncoder(tokenizer_file(kind).encode())


@pytest.fixture
def alone(kind):
    """The library by itself, told to cut and fill nothing."""
    tokenizer = Tokenizer.from_str(tokenizer_file(kind))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@pytest.mark.parametrize("name", TEXTS)
def test_ids_and_decoded_text_are_the_librarys_own_over_the_golden_texts(kind, encoder, alone, name):
    text = golden("moses")[name]
    documents = [text, *text.split("\n")]
    expected = [one.ids for one in alone.encode_batch(documents, add_special_tokens=False)]
    found = encoder.encode_batch(documents)
    assert alone.id_to_token(encoder.end_id) == ENDS[kind]
    assert [ids for ids, _ in found] == [[*ids, encoder.end_id] for ids in expected]
    assert [words for _, words in found] == [len(document.split()) for document in documents]
    assert [encoder.decode(ids) for ids, _ in found] == alone.decode_batch(expected, skip_special_tokens=True)


def test_a_byte_level_tokenizer_gives_every_golden_text_back_byte_for_byte():
    encoder = LibraryEncoder(tokenizer_file("byte-level").encode())
    for name in TEXTS:
        text, ids = golden("moses")[name], array("H")
        encoder.encode(text, ids)
        assert encoder.decode(ids) == text


@pytest.mark.parametrize("kind", ["byte-level", "wordpiece"], indirect=True)
def test_the_name_of_a_special_token_in_a_text_is_text(encoder, alone, kind):
    [(ids, _)] = encoder.encode_batch([f"one {ENDS[kind]} two"])
    assert ids.count(encoder.end_id) == 1 and ids[-1] == encoder.end_id
    assert encoder.end_id in alone.encode(f"one {ENDS[kind]} two", add_special_tokens=False).ids


def test_a_line_break_stands_between_two_documents_and_a_prompt_does_not_end(encoder):
    one, two = (ids for ids, _ in encoder.encode_batch(["first bank", "second bank"]))
    assert encoder.decode([*one, *two]) == f"{encoder.decode(one)}\n{encoder.decode(two)}"
    assert encoder.prompt("first bank") == [encoder.end_id, *one[:-1]]
    assert encoder.decode([]) == "" and encoder.prompt("") == [encoder.end_id]


def test_generation_gives_no_special_token_but_the_end_and_no_number_without_a_token():
    content = json.loads(tokenizer_file("byte-level"))
    highest = max(content["model"]["vocab"].values())
    content["added_tokens"].append({**content["added_tokens"][0], "id": highest + 3, "content": "<mark>"})
    assert Tokenizer.from_str(json.dumps(content)).token_to_id("<mark>") is not None
    encoder = LibraryEncoder(json.dumps(content).encode())
    marks = {Tokenizer.from_str(json.dumps(content)).token_to_id(name) for name in ("<mark>", "<|pad|>")}
    assert marks <= set(encoder.unsampled) and encoder.end_id not in encoder.unsampled


def test_what_the_vocabulary_does_not_know_has_the_models_own_id():
    assert LibraryEncoder(tokenizer_file("byte-level").encode()).unknown_id is None
    for kind, name in (("metaspace", "<unk>"), ("wordpiece", "[UNK]")):
        encoder = LibraryEncoder(tokenizer_file(kind).encode())
        assert encoder.unknown_id == Tokenizer.from_str(tokenizer_file(kind)).token_to_id(name)
        assert encoder.unknown_id in encoder.encode_batch(["\u0f40"])[0][0]


BROKEN = {
    "empty": (b"", "no tokenizer.json that the library reads"),
    "not UTF-8": (b"\xff\xfe{", "no tokenizer.json that the library reads"),
    "of something else": (b'{"specials": [], "encoder": {}}', "no tokenizer.json that the library reads"),
    "cut": (tokenizer_file("byte-level").encode()[:-100], "no tokenizer.json that the library reads"),
    "without tokens": (b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}', "is empty"),
    "random": (changed("byte-level", dropout=0.1).encode(), "leaves out 0.1 of its merges at random"),
    "with a huge id": (
        changed("byte-level", vocab={"a": 0, END: 1, "b": 2**31}, merges=[]).encode(),
        "id 2147483648, more than a model has tokens",
    ),
}


@pytest.mark.parametrize("content, message", BROKEN.values(), ids=BROKEN)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(content, message):
    with pytest.raises(UserError, match=message) as error:
        LibraryEncoder(content, where="some/tokenizer.json")
    assert error.value.where == "some/tokenizer.json"


def test_an_end_that_the_tokenizer_does_not_have_is_refused_with_those_it_has():
    content = tokenizer_file("byte-level").encode()
    with pytest.raises(UserError, match=r"no token '</s>'\n.*<\|endoftext\|>, <\|pad\|>"):
        LibraryEncoder(content, "</s>")
    assert LibraryEncoder(content, "<|pad|>").end_id == 1
    without = tokenizer_file("byte-level").replace(END, "<x>").encode()
    with pytest.raises(UserError, match=r"no token by which the end of a document is known.*\n.*<x>, <\|pad\|>"):
        LibraryEncoder(without)


def test_a_text_that_the_tokenizer_has_no_ids_for_is_refused():
    content = json.loads(tokenizer_file("byte-level"))
    content["model"] = {"type": "WordLevel", "vocab": {"known": 0, END: 1}, "unk_token": "<unk>"}
    content["added_tokens"] = []
    encoder = LibraryEncoder(json.dumps(content).encode())
    assert encoder.encode_batch(["known"])[0][0] == [0, 1]
    with pytest.raises(UserError, match="has no ids for a text"):
        encoder.encode_batch(["new"])


def test_a_missing_file_and_a_missing_library_are_said(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no such file"):
        LibraryEncoder.load(tmp_path / "tokenizer.json")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UserError, match="not installed") as error:
        library.require_library()
    assert error.value.fix == library.INSTALL


def test_what_is_learned_depends_neither_on_the_order_of_the_texts_nor_on_threads(monkeypatch):
    texts = golden("moses")["news.txt"].split("\n")
    found = set()
    for order, parallel in ((texts, "true"), (texts[::-1], "true"), (sorted(texts), "false")):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        found.add(learn_byte_level(iter(order), 700, [END, "<mark>"], 1))
    [content] = found
    encoder = LibraryEncoder(content.encode())
    assert (encoder.size, encoder.end_id, encoder.unsampled) == (700, 0, [1])
    assert sorted(len(json.loads(content)["model"]["merges"]) for content in found) == [700 - 2 - 256]


def test_learned_merges_are_those_of_the_most_frequent_pairs():
    content = json.loads(learn_byte_level(iter(["ab ab ab ab", "xab cd cd"]), 256 + 3, [END], 1))
    merges = [tuple(merge) for merge in content["model"]["merges"]]
    assert merges == [
        ("a", "b"),
        ("\u0120", "ab"),
    ]  # "ab" five times, then " ab" three times (U+0120 is the byte of a space)


def test_a_pair_seen_less_often_than_asked_is_not_merged():
    content = json.loads(learn_byte_level(iter(["ab ab ab cd cd"]), 1000, [END], 3))
    assert {"".join(merge) for merge in content["model"]["merges"]} == {"ab"}


def with_split(pattern: str, behavior: str = "Isolated", **changes) -> bytes:
    """The byte-level tokenizer with a pattern of another kind in front, as Llama 3's and Qwen's files have it."""
    content = json.loads(tokenizer_file("byte-level"))
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, {**content["pre_tokenizer"], "use_regex": False}],
    }
    return json.dumps(content | changes).encode()


CUT_TOKENIZERS = [tokenizer_file("byte-level").encode(), *map(with_split, sorted(PATTERNS))]


@pytest.mark.parametrize("content", CUT_TOKENIZERS, ids=["GPT-2", "1", "2"])
@given(
    text=st.text(
        st.sampled_from(" \n\r\t\x1c\x85\xa0\u2003\u2028\u3000a\u00e9\u4e2d7\u0663'sS.-\u0301\U0001f600"), max_size=40
    )
)
def test_a_text_cut_before_single_spaces_has_the_ids_of_the_whole(content, text):
    encoder = LibraryEncoder(content)
    assert encoder._chunks is not None
    assert encoder.encode_batch([text])[0][0] == [*encoder._library_ids([text])[0], encoder.end_id]


def test_only_what_is_known_to_split_before_a_space_is_cut_there():
    assert all(map(cuts_before_spaces, CUT_TOKENIZERS))
    of_letters = with_split(r"\p{L}+ \p{L}+|\s+")
    merged = with_split(min(PATTERNS), "MergedWithNext")
    normalized = with_split(min(PATTERNS), normalizer={"type": "NFC"})
    for content in (of_letters, merged, normalized, *(tokenizer_file(k).encode() for k in ("metaspace", "wordpiece"))):
        assert not cuts_before_spaces(content)
