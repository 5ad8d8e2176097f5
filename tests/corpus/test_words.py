import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pkm.corpus.words import LibraryWords
from pkm.text.library import LibraryEncoder
from pkm.text.moses import tokenize
from tests.support.tokenizer_files import END, tokenizer_file
from tests.text.goldens import golden


def read(encoder, text):
    """The ids of a document and its words, with the text of the tokens that each takes."""
    [(ids, _)] = encoder.encode_batch([text])
    return ids, LibraryWords(encoder)(ids)


def test_words_of_a_byte_level_tokenizer_are_the_tokens_of_moses():
    encoder = LibraryEncoder(tokenizer_file("byte-level").encode())
    words = LibraryWords(encoder)
    for line in golden("moses")["news.txt"].splitlines():
        if line.strip():
            [(ids, _)] = encoder.encode_batch([line])
            found = words(ids)
            assert [word.text for word in found] == [*tokenize(line).split(), ""]
            for text, first, end in found[:-1]:
                if first is not None and end is not None:
                    assert encoder.decode(ids[first:end]).strip() == text


@pytest.mark.parametrize("kind", ("byte-level", "metaspace"))
def test_a_word_has_the_tokens_that_it_is_made_of(kind):
    encoder = LibraryEncoder(tokenizer_file(kind).encode())
    ids, words = read(encoder, "It was sold to Ann Lee. They said so.")
    assert [word.text for word in words] == [
        "It",
        "was",
        "sold",
        "to",
        "Ann",
        "Lee",
        ".",
        "They",
        "said",
        "so",
        ".",
        "",
    ]
    for text, first, end in words[:-1]:
        assert encoder.decode(ids[first:end]).strip() == text
    assert [word.first for word in words[1:-1]] == [word.end for word in words[:-2]]


def test_what_ends_within_a_token_has_no_end_there_and_the_last_word_of_cut_text_is_none():
    tokens = [END, "a", "\u0120Lee.", '\u0120Ann,"', "\u0120so", "\u00c3", "\u00a9", "\u0120"]
    tokenizer = Tokenizer(models.BPE(dict(zip(tokens, range(8), strict=True)), []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    words = LibraryWords(LibraryEncoder(tokenizer.to_str().encode()))
    assert words([1, 2, 3, 4, 4]) == [
        ("a", 0, 1), ("Lee", 1, None), (".", None, 2), ("Ann", 2, None), (",", None, None), ('"', None, 3), ("so", 3, 4),
    ]  # fmt: skip
    # Bytes of a character are text together; white space of its own begins no word.
    assert words([4, 5, 6, 7, 1, 0]) == [("so\u00e9", 0, 3), ("a", 4, 5), ("", None, None)]


def test_marks_at_the_ends_of_words_are_read():
    tokens = ["<unk>", END, *"elnA", "e</w>", "n</w>", "Le", "Lee</w>", "Ann</w>", "L", "An", "."]
    merges = [("L", "e"), ("Le", "e</w>"), ("A", "n"), ("An", "n</w>")]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)}, merges, end_of_word_suffix="</w>", unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder()
    content = json.loads(tokenizer.to_str())
    encoder = LibraryEncoder(json.dumps(content).encode(), END)
    ids, words = read(encoder, "Ann Lee en Ann")
    assert [encoder._tokenizer.id_to_token(i) for i in ids] == ["Ann</w>", "Lee</w>", "e", "n</w>", "Ann</w>", END]
    assert words == [("Ann", 0, 1), ("Lee", 1, 2), ("en", 2, 4), ("Ann", 4, 5), ("", None, None)]
