"""Moses' tokenizer for English, fast: `tokenizer.perl -l en`, byte for byte, with a cache of whitespace chunks.

As a filter: python -m pkm.text.moses [--escape] [--normalize xlm] [--detokenize] < in > out
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from typing import Literal

from pkm.errors import exits_cleanly
from pkm.text.bounded_cache import BoundedCache
from pkm.text.chunks import NEWLINE, document_keys, key_tokens
from pkm.text.detokenize import detokenize
from pkm.text.moses_rules import is_blank
from pkm.text.normalize import normalize_xlm
from pkm.text.stdin_filter import run_filter

__all__ = ["Normalization", "Tokenizer", "WordCounter", "detokenize", "tokenize"]

Normalization = Literal["xlm"] | None

_MOST_CHARACTERS = 1 << 29
"""How much text WordCounter reads before it tokenizes: chunks that never come again must not fill the memory."""


def tokenize(text: str, escape: bool = False, normalize: Normalization = None) -> str:
    """Lines -> their tokens with single spaces between, as Moses prints them."""
    return Tokenizer(escape, normalize).text(text)


class Tokenizer:
    """Text to tokens, with a cache of the tokens of at most `remember` chunks."""

    def __init__(self, escape: bool = False, normalize: Normalization = None, remember: int = 1_000_000):
        self._normalize = normalize
        self._tokens = BoundedCache(lambda key: key_tokens(key, escape), remember)

    def text(self, text: str) -> str:
        """As many lines as come in. A blank line stays as it is; a closing `.'` leaves a space, as in Moses."""
        if self._normalize == "xlm":
            text = normalize_xlm(text)
        return NEWLINE.join(map(self._line, text.split(NEWLINE)))

    def _line(self, line: str) -> str:
        if is_blank(line):
            return line
        keys = document_keys(line)[:-1]
        return " ".join(map(self._tokens.__getitem__, keys))


class WordCounter:
    """How often each Moses word occurs in documents: what byte-pair codes are learned from.

    Whatever can be tokenized apart from the rest, chunks, is counted first and tokenized once; at most `remember`
    different ones are kept at a time. line_tokens: another tokenizer, from a line to its tokens; then lines are counted.
    """

    def __init__(
        self,
        escape: bool = False,
        normalize: Normalization = None,
        remember: int = 2_000_000,
        line_tokens: Callable[[str], str] | None = None,
    ):
        self._normalize, self._remember = normalize, remember
        self._split = _lines if line_tokens else document_keys
        self._tokens = line_tokens or (lambda key: key_tokens(key, escape))
        self._chunks: Counter[str] = Counter()
        self._words: Counter[str] = Counter()
        self._characters = 0

    def add(self, text: str) -> int:
        """Count a document; how many chunks it has."""
        chunks = self._split(normalize_xlm(text) if self._normalize == "xlm" else text)
        self._chunks.update(chunks)
        self._characters += len(text)
        if len(self._chunks) > self._remember or self._characters > _MOST_CHARACTERS:
            self._tokenize_chunks()
        return len(chunks)

    def words(self) -> Counter[str]:
        """Counts of words so far."""
        self._tokenize_chunks()
        return self._words

    def _tokenize_chunks(self) -> None:
        del self._chunks[NEWLINE]
        for key, count in self._chunks.items():
            for word in self._tokens(key).split(" "):
                self._words[word] += count
        del self._words[""]
        self._chunks.clear()
        self._characters = 0


def _lines(text: str) -> list[str]:
    return text.split(NEWLINE)


@exits_cleanly
def main() -> None:
    """The filter."""
    parser = argparse.ArgumentParser(
        prog="python -m pkm.text.moses",
        description="Tokenize English text as Moses' tokenizer.perl -l en -no-escape does; stdin to stdout, UTF-8.",
    )
    parser.add_argument("--escape", action="store_true", help="write & | < > ' \" [ ] as entities (no -no-escape)")
    parser.add_argument(
        "--normalize", choices=["xlm"], help="first normalise punctuation and drop what does not print, as XLM does"
    )
    parser.add_argument("--detokenize", action="store_true", help="the other way: tokens to readable text")
    options = parser.parse_args()
    if options.detokenize:
        if options.escape or options.normalize:
            parser.error("--detokenize takes neither --escape nor --normalize (entities are always undone)")
        run_filter(lambda text: NEWLINE.join(map(detokenize, text.split(NEWLINE))))
    else:
        tokenizer = Tokenizer(options.escape, options.normalize)
        run_filter(tokenizer.text)


if __name__ == "__main__":
    sys.exit(main())
