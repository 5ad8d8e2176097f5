"""Where words stand among the ids of a corpus: those of Moses, whatever the tokenizer, so that all corpora have the same words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from pkm.corpus.store import Corpus
from pkm.errors import UserError
from pkm.text.bounded_cache import BoundedCache
from pkm.text.chunks import NEWLINE, document_keys, key_tokens
from pkm.text.library import LibraryEncoder
from pkm.text.vocab import CONTINUES, EOS_ID, Vocab

NO_WORDS = (
    "it was prepared from ids without their tokenizer, so that nobody knows where a name or a number stands in it"
)
REMEMBERED = 1 << 18
FAR = 64
"""Characters between two tokens of Moses beyond which the text is not what it made them of."""
PART = "\ufffd"
"""In the text of a token that ends within a character."""


class Word(NamedTuple):
    """A token of Moses; of the end of a line or a document the text is ""."""

    text: str
    first: int | None
    """Its first token, with which white space before the word may begin; None where the word begins within one."""
    end: int | None
    """The token after its last; None where the word ends within one."""


Words = Callable[[Sequence[int]], list[Word]]
"""The whole words of consecutive ids. What is left of a word that was cut may be missing or taken for one where the ids begin."""


def words_of(corpus: Corpus) -> Words:
    """UserError for text that came as ids without a tokenizer."""
    if isinstance(corpus.vocab, Vocab):
        return MosesWords(corpus.vocab)
    if not corpus.decodes:
        raise UserError(NO_WORDS, str(corpus.path), "leave out facts, or prepare it again with subwords.tokenizer")
    encoder = corpus.encoder()
    assert isinstance(encoder, LibraryEncoder)
    return LibraryWords(encoder)


class MosesWords:
    """Of a vocabulary whose pieces say where a word goes on: a word begins and ends with a token."""

    def __init__(self, vocab: Vocab):
        self._pieces, self._ends = [piece.removesuffix(CONTINUES) for piece in vocab.pieces], vocab.word_ends.tolist()

    def __call__(self, ids: Sequence[int]) -> list[Word]:
        words: list[Word] = []
        first = 0
        for i, token in enumerate(ids):
            if token == EOS_ID:
                words.append(Word("", i, i + 1))
            elif self._ends[token]:
                words.append(Word("".join(self._pieces[one] for one in ids[first : i + 1]), first, i + 1))
            else:
                continue
            first = i + 1
        return words


class LibraryWords:
    """Of a tokenizer.json: the ids' text, tokenized as Moses does, each of its tokens looked for in the text."""

    def __init__(self, encoder: LibraryEncoder):
        self._encoder = encoder
        self._texts = encoder.added_texts([[i] for i in range(encoder.size)])
        self._texts[encoder.end_id] = NEWLINE
        self._partly = [PART in text for text in self._texts]
        self._tokens = BoundedCache(lambda key: key_tokens(key, escape=False), REMEMBERED)

    def __call__(self, ids: Sequence[int]) -> list[Word]:
        text, begins, ends = self._placed(ids)
        keys = document_keys(text)
        if not text.endswith(NEWLINE):
            del keys[-2:]  # the last chunk may go on, and the line does
        words: list[Word] = []
        at = 0
        for key in keys:
            if key == NEWLINE:
                words.append(Word("", None, None))
                continue
            for token in self._tokens[key].split():
                found = text.find(token, at, at + FAR + len(token))
                if found >= 0:
                    at = found + len(token)
                    words.append(Word(token, begins.get(found), ends.get(at)))
        return words

    def _placed(self, ids: Sequence[int]) -> tuple[str, dict[int, int], dict[int, int]]:
        """The text; by place in it the token that begins there but for white space, and the one after that which ends there."""
        parts: list[str] = []
        begins: dict[int, int] = {}
        ends: dict[int, int] = {}
        size = first = 0
        # Tokens that hold parts of characters are text only together.
        for partly, run in groupby(ids, self._partly.__getitem__):
            tokens = list(run)
            for some in [tokens] if partly else [[i] for i in tokens]:
                text = self._encoder.added_texts([some])[0] if partly else self._texts[some[0]]
                begins[size + len(text) - len(text.lstrip())] = first
                first += len(some)
                ends.setdefault(size + len(text.rstrip()), first)
                size += len(text)
                parts.append(text)
        return "".join(parts), begins, ends
