"""Writes a prepared corpus: shard by shard, then the manifest that makes one of them (pkm.corpus.store says what they hold)."""

from __future__ import annotations

import hashlib
import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from pkm.corpus.store import (
    COUNT,
    FORMAT,
    OTHER_FORMAT,
    SPLITS,
    START,
    TOKENIZER,
    OtherVocab,
    Shard,
    fingerprint_of,
    id_type,
)
from pkm.files import NewFile, atomic_write, explained, fsync_directory, sha256
from pkm.text.vocab import UNK_ID, Vocab

FLUSH_TOKENS = 1 << 21


class ShardWriter:
    """Writes one shard. Encode a document into `ids`, then call `end_document`; `close` gives its files their names.

    Until then they have temporary ones, so a shard is there whole or not at all. Memory: `FLUSH_TOKENS` ids.

    unknown_id    what is counted as unknown; None: nothing is
    count_words   keep the words of every document besides their sum
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        vocab_size: int,
        unknown_id: int | None = UNK_ID,
        count_words: bool = False,
    ):
        self.directory, self.name, self._unknown_id = directory, name, unknown_id
        self.dtype = id_type(vocab_size)
        self.ids = array("H" if self.dtype.itemsize == 2 else "I")
        self.documents = self.words = self.bytes = self.tokens = self.unknown = 0
        self.max_id = -1
        self._starts, self._words = array("Q"), array("I")
        self._start = 0
        suffixes = ("bin", "idx", "words") if count_words else ("bin", "idx")
        self._files = [NewFile(directory / f"{name}.{suffix}") for suffix in suffixes]
        self._hashes = [hashlib.sha256() for _ in suffixes]

    def end_document(self, words: int, size: int) -> None:
        """The ids appended since the last call are one document of `words` words and `size` bytes of text."""
        self._starts.append(self._start)
        self._words.append(words)
        self._start = self.tokens + len(self.ids)
        self.documents += 1
        self.words += words
        self.bytes += size
        if len(self.ids) >= FLUSH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        values = np.frombuffer(self.ids, self.ids.typecode) if self.ids else np.empty(0, self.dtype)
        self.max_id = max(self.max_id, int(values.max()) if len(values) else -1)
        self.tokens += len(values)
        self.unknown += 0 if self._unknown_id is None else int(np.count_nonzero(values == self._unknown_id))
        starts = np.frombuffer(self._starts, "Q") if self._starts else np.empty(0, START)
        words = np.frombuffer(self._words, "I") if self._words else np.empty(0, COUNT)
        contents = values.astype(self.dtype), starts.astype(START), words.astype(COUNT)
        # Without a file for words they are summed alone.
        for file, digest, content in zip(self._files, self._hashes, map(np.ndarray.tobytes, contents), strict=False):
            file.write(content)
            digest.update(content)
        # New arrays: numpy's views above forbid shrinking the old ones.
        self.ids = array(self.ids.typecode)
        self._starts, self._words = array("Q"), array("I")

    def close(self) -> Shard:
        """Finish the shard and publish its files, durable."""
        self._flush()
        for file in self._files:
            file.publish()
        with explained(self.directory):
            fsync_directory(self.directory)
        counts = self.documents, self.words, self.tokens, self.bytes, self.max_id
        bin_sha256, idx_sha256, *words_sha256 = (digest.hexdigest() for digest in self._hashes)
        return Shard(self.name, *counts, bin_sha256, idx_sha256, self.unknown, *words_sha256)

    def discard(self) -> None:
        """Remove what was written."""
        for file in self._files:
            file.discard()


def write_manifest(
    path: Path,
    shards: dict[str, list[Shard]],
    vocab: Vocab | OtherVocab,
    tokenizer: dict[str, Any],
    about: dict[str, Any],
) -> dict[str, Any]:
    """Write manifest.json beside what makes subwords and the shards; `about` is kept as it is (settings, what was dropped).

    tokenizer: the settings of ours; of another, what it is called, besides what is found here.
    """
    manifest: dict[str, Any] = {
        "format": FORMAT if isinstance(vocab, Vocab) else OTHER_FORMAT,
        "tokenizer": tokenizer,
        "dtype": id_type(vocab.size).str,
        "vocab_size": vocab.size,
    }
    if isinstance(vocab, Vocab):
        manifest["codes"] = {"sha256": sha256(path / "codes")}
        manifest["vocab"] = {"sha256": sha256(path / "vocab"), "specials": list(vocab.specials)}
    else:
        ids = {"end_id": vocab.end_id, "unknown_id": vocab.unknown_id}
        manifest["tokenizer"] = {**tokenizer, **ids}
        if tokenizer["library"]:
            manifest["tokenizer"]["sha256"] = sha256(path / TOKENIZER)
    manifest["splits"] = {}
    for name in SPLITS:
        counts = {key: sum(getattr(s, key) for s in shards[name]) for key in ("documents", "words", "tokens", "bytes")}
        manifest["splits"][name] = {**counts, "shards": [shard.record() for shard in shards[name]]}
    manifest |= about
    manifest["fingerprint"] = fingerprint_of(manifest)
    atomic_write(path / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    return manifest
