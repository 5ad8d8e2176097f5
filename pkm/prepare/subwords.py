"""What makes a corpus's subwords: codes and vocabulary, learned from the words of its sample or taken from files, or a
tokenizer.json."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import zstandard

from pkm.corpus.store import OtherVocab
from pkm.errors import UserError
from pkm.files import atomic_write, explained, sha256
from pkm.machine import cpu_seconds, peak_kilobytes
from pkm.prepare.settings import END, PrepareConfig
from pkm.text.encode import Encoder
from pkm.text.library import LibraryEncoder, learn_byte_level, require_library

AnyEncoder = Encoder | LibraryEncoder | OtherVocab
"""What knows the ids of a corpus: of text that came as ids without a tokenizer, their numbers alone."""

CODES, VOCAB, TOKENIZER = "codes", "vocab", "tokenizer.json"


def learn(
    config: PrepareConfig,
    counts: Sequence[Path],
    texts: Iterator[str],
    into: Path,
    say: Callable[[str], None],
    stages: dict[str, dict[str, Any]],
) -> None:
    """Write `codes`, then `vocab`, or `tokenizer.json` into a directory.

    counts: files of `word count` lines, zst. texts: of the sample. What is not needed of the two is not looked at.
    """
    if config.subwords.tokenizer is not None:
        check_given(config)
        atomic_write(into / TOKENIZER, config.subwords.tokenizer.read_bytes())
        return
    if config.subwords.codes_file is not None and config.subwords.vocab_file is not None:
        check_given(config)
        atomic_write(into / "codes", config.subwords.codes_file.read_bytes())
        atomic_write(into / "vocab", config.subwords.vocab_file.read_bytes())
        return
    began, worked = time.monotonic(), cpu_seconds()
    words = _learn_codes(config, counts, into, say) if config.is_moses else _learn_byte_level(config, texts, into, say)
    stages["learning subwords"] = {
        "tasks": 1,
        "words": words,
        "seconds": time.monotonic() - began,
        "cpu_seconds": cpu_seconds() - worked,
        "peak_kilobytes": peak_kilobytes(),
    }


def _learn_byte_level(config: PrepareConfig, texts: Iterator[str], into: Path, say: Callable[[str], None]) -> int:
    """Write tokenizer.json; returns the words of the sample."""
    subwords, words = config.subwords, 0
    asked = subwords.vocab_size or 0

    def counted() -> Iterator[str]:
        nonlocal words
        for text in texts:
            words += len(text.split())
            yield text

    say(f"learning a byte-level vocabulary of {asked:,}")
    content = learn_byte_level(counted(), asked, (subwords.end or END, *subwords.specials), subwords.min_count)
    if not words:
        raise _nothing_to_learn_from()
    encoder = LibraryEncoder(content.encode(), subwords.end)
    if encoder.size < asked:
        say(
            f"only {encoder.size:,} of {asked:,} tokens: the sample holds no more pairs seen {subwords.min_count:,} times"
        )
    atomic_write(into / TOKENIZER, content)
    say(f"a vocabulary of {encoder.size:,}")
    return words


def _nothing_to_learn_from() -> UserError:
    return UserError("there is no word to learn subwords from", "sources", "check what the corpus is read from")


def _learn_codes(config: PrepareConfig, counts: Sequence[Path], into: Path, say: Callable[[str], None]) -> int:
    """Write codes and vocabulary; returns the words of the sample."""
    from pkm.text.bpe import count_pieces
    from pkm.text.bpe import learn as learn_codes
    from pkm.text.vocab import Vocab

    words = merged(counts)
    if not words:
        raise _nothing_to_learn_from()
    say(f"learning {config.subwords.codes:,} merges from {len(words):,} different words")
    codes = learn_codes(words, config.subwords.codes)
    pieces = count_pieces(codes, words)
    _frequent(pieces, config.subwords.min_count)
    vocab = Vocab.from_counts(pieces, config.subwords.min_count, config.subwords.specials)
    atomic_write(into / "codes", codes.to_bytes())
    atomic_write(into / "vocab", vocab.to_bytes())
    say(f"{len(codes):,} merges, a vocabulary of {vocab.size:,}")
    return sum(words.values())


def files(config: PrepareConfig) -> tuple[str, ...]:
    """What `learn` writes, the last one last."""
    if config.is_moses:
        return CODES, VOCAB
    return () if config.ids_given and config.subwords.tokenizer is None else (TOKENIZER,)


def given_ids(config: PrepareConfig) -> LibraryEncoder | OtherVocab:
    """What the ids of sources mean: by the tokenizer that the settings name, or by their numbers alone."""
    if config.subwords.tokenizer is not None:
        return LibraryEncoder.load(config.subwords.tokenizer, config.subwords.end)
    assert config.subwords.vocab_size is not None and config.subwords.end_id is not None
    return OtherVocab(config.subwords.vocab_size, config.subwords.end_id, None)


@lru_cache(maxsize=1)
def _encoder(learned: Path, content: str, config: str) -> Encoder | LibraryEncoder:
    """See encoder_of. content: hashes of the files. config: what is read of the settings, as JSON."""
    from pkm.text.bpe import Codes
    from pkm.text.vocab import Vocab

    settings = json.loads(config)
    if (learned / TOKENIZER).exists():
        return LibraryEncoder.load(learned / TOKENIZER, settings["end"])
    codes, vocab = Codes.load(learned / CODES), Vocab.load(learned / VOCAB, settings["specials"])
    return Encoder(codes, vocab, **settings["tokenizer"])


def encoder_of(config: PrepareConfig, learned: Path) -> AnyEncoder:
    """The encoder of what `learn` wrote; a worker keeps it, and its caches, from one task to the next."""
    if not files(config):
        return given_ids(config)
    content = "".join(sha256(learned / name) for name in files(config))
    settings = {
        "end": config.subwords.end,
        "specials": config.subwords.specials,
        "tokenizer": config.tokenizer.model_dump(),
    }
    return _encoder(learned, content, json.dumps(settings))


def merged(paths: Sequence[Path]) -> Counter[str]:
    """Word counts of several files together."""
    total: Counter[str] = Counter()
    for path in paths:
        with explained(path):
            content = zstandard.ZstdDecompressor().decompress(path.read_bytes())
        for line in content.decode("utf-8").split("\n")[:-1]:
            word, _, number = line.rpartition(" ")
            total[word] += int(number)
    return total


def check_given(config: PrepareConfig) -> None:
    """UserError where given files do not load: before anything is read, as that may take hours."""
    if config.subwords.tokenizer is not None:
        LibraryEncoder.load(config.subwords.tokenizer, config.subwords.end)
    if config.subwords.learn == "byte-level":
        require_library()
    from pkm.text.bpe import Codes
    from pkm.text.vocab import Vocab

    if config.subwords.codes_file is not None and config.subwords.vocab_file is not None:
        Codes.load(config.subwords.codes_file)
        Vocab.load(config.subwords.vocab_file, config.subwords.specials)


def _frequent(pieces: Counter[str], min_count: int) -> None:
    """UserError where none of the pieces is frequent enough for a vocabulary."""
    most = max(pieces.values(), default=0)
    if most < min_count:
        what = f"no subword is seen {min_count} times in the sample, so that the vocabulary would be empty"
        less = "ask for far less than that (the default is 1), or for a larger sample"
        raise UserError(what, "subwords.min_count", f"the most frequent is seen {most} times: {less}")
