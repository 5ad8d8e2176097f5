"""A prepared corpus on disk: opened memory-mapped, written shard by shard.

    manifest.json      format version, tokenizer, hashes, counts, shards, settings, what was dropped
    codes  vocab       the subwords, in fastBPE's formats
    train-00000.bin    ids of one shard, little-endian, uint16 where the vocabulary fits, else uint32
    train-00000.idx    where each of its documents starts in it, little-endian uint64, in tokens

Each split (train, valid, test) is one long sequence of tokens: its documents in order, across its shards.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pkm.errors import UserError
from pkm.files import NewFile, atomic_write, explained, fsync_directory, read_json, sha256
from pkm.text.vocab import SPECIALS, UNK_ID, Vocab

if TYPE_CHECKING:
    from pkm.text.encode import Encoder

FORMAT = 1
SPLITS = ("train", "valid", "test")
START = np.dtype("<u8")
FLUSH_TOKENS = 1 << 21
COUNTED_TOKENS = 1 << 22


def id_type(vocab_size: int) -> np.dtype:
    """The narrowest type on disk that holds every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class Shard:
    """One shard as the manifest lists it; `file` is its name without .bin and .idx."""

    file: str
    documents: int
    words: int
    tokens: int
    bytes: int
    max_id: int
    bin_sha256: str
    idx_sha256: str
    unknown: int | None = None
    """Tokens that are <unk>; None in a manifest from before they were counted."""


class Split:
    """The documents of one split as one sequence of token ids. Nothing is read before it is asked for.

    documents, words (Moses words), tokens (subwords and one </s> a line), bytes (UTF-8, of the text before tokenizing)
    """

    def __init__(self, name: str, path: Path, dtype: np.dtype, shards: Sequence[Shard]):
        self.name = name
        self.documents = sum(shard.documents for shard in shards)
        self.words = sum(shard.words for shard in shards)
        self.tokens = sum(shard.tokens for shard in shards)
        self.bytes = sum(shard.bytes for shard in shards)
        counts = [shard.unknown for shard in shards]
        self._unknown = None if None in counts else sum(count or 0 for count in counts)
        self._path = path
        self._dtype = dtype
        # An empty shard has no place in a search by token or document. None has tokens without documents.
        self._shards = [shard for shard in shards if shard.documents]
        self._first_token = np.cumsum([0, *(shard.tokens for shard in self._shards)])
        self._first_document = np.cumsum([0, *(shard.documents for shard in self._shards)])
        self._mapped: dict[str, np.ndarray] = {}

    @property
    def unknown_share(self) -> float:
        """Share of <unk> among the tokens; of the first COUNTED_TOKENS where the manifest does not know."""
        if self._unknown is not None:
            return self._unknown / max(self.tokens, 1)
        first = self.read(0, COUNTED_TOKENS)
        return float((first == UNK_ID).mean()) if len(first) else 0.0

    def _map(self, name: str, dtype: np.dtype) -> np.ndarray:
        if name not in self._mapped:
            with explained(self._path / name):
                # A plain view: slicing np.memmap itself costs several microseconds.
                self._mapped[name] = np.memmap(self._path / name, dtype, mode="r").view(np.ndarray)
        return self._mapped[name]

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with tokens [start, start + len(out)), across shards."""
        if start < 0 or start + len(out) > self.tokens:
            raise IndexError(f"tokens [{start}, {start + len(out)}) of {self.tokens}")
        filled = 0
        shard = int(np.searchsorted(self._first_token, start, side="right")) - 1
        while filled < len(out):
            if self._shards[shard].tokens == 0:
                # Documents, but all of them empty: there is nothing that could be mapped.
                shard += 1
                continue
            ids = self._map(f"{self._shards[shard].file}.bin", self._dtype)
            begin = start + filled - int(self._first_token[shard])
            piece = ids[begin : begin + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start, stop) as int64; `stop` beyond the end is the end, as in a slice."""
        start, stop, _ = slice(start, stop).indices(self.tokens)
        out = np.empty(max(0, stop - start), np.int64)
        self.read_into(start, out) if len(out) else None
        return out

    def document_start(self, i: int) -> int:
        """Offset of document i's first token; document_start(documents) is the number of tokens."""
        if i == self.documents:
            return self.tokens
        if not 0 <= i < self.documents:
            raise IndexError(f"document {i} of {self.documents}")
        shard = int(np.searchsorted(self._first_document, i, side="right")) - 1
        starts = self._map(f"{self._shards[shard].file}.idx", START)
        return int(self._first_token[shard]) + int(starts[i - int(self._first_document[shard])])

    def documents_at(self, offsets: np.ndarray) -> np.ndarray:
        """The document that each token is of, int64: offsets (...) of tokens -> (...); beyond the end, that of the last."""
        offsets = np.minimum(offsets, self.tokens - 1)
        shards = np.searchsorted(self._first_token, offsets, side="right") - 1
        found = np.empty_like(offsets, np.int64)
        for shard in np.unique(shards).tolist():
            here = shards == shard
            starts = self._map(f"{self._shards[shard].file}.idx", START)
            wanted = (offsets[here] - self._first_token[shard]).astype(START)
            found[here] = self._first_document[shard] + np.searchsorted(starts, wanted, side="right") - 1
        return found

    def document(self, i: int) -> np.ndarray:
        """Token ids of document i, int64."""
        return self.read(self.document_start(i), self.document_start(i + 1))


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus. `fingerprint` names its content: equal if and only if codes, vocabulary and all ids are."""

    path: Path
    manifest: dict[str, Any]
    vocab: Vocab
    train: Split | None
    valid: Split | None
    test: Split | None

    @property
    def fingerprint(self) -> str:
        return self.manifest["fingerprint"]

    def split(self, name: str) -> Split | None:
        return {"train": self.train, "valid": self.valid, "test": self.test}[name]

    def encoder(self) -> Encoder:
        """The encoder that made the ids; it also decodes them."""
        from pkm.text.bpe import Codes
        from pkm.text.encode import Encoder

        return Encoder(Codes.load(self.path / "codes"), self.vocab, **self.manifest["tokenizer"])


def fingerprint_of(manifest: dict[str, Any]) -> str:
    """SHA-256 over everything that decides the ids: tokenizer, hashes of codes, vocabulary and shards."""
    shards = [[s, x["bin_sha256"], x["idx_sha256"]] for s in SPLITS for x in manifest["splits"][s]["shards"]]
    content = [manifest["format"], manifest["tokenizer"], manifest["codes"], manifest["vocab"], shards]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def open_corpus(path: str | Path) -> Corpus:
    """Open a prepared corpus: milliseconds and a few megabytes, whatever its size.

    Verified: format version, hashes of codes and vocabulary, every shard's size, ids below the vocabulary's size.
    UserError where one of these fails. (`scripts/prepare.py --verify` also hashes every shard.)
    """
    path = Path(path)
    manifest = read_manifest(path)
    for name in ("codes", "vocab"):
        if sha256(path / name) != manifest[name]["sha256"]:
            raise _damaged("it was changed after the corpus was prepared", path / name)
    vocab = Vocab.load(path / "vocab", manifest["vocab"].get("specials", SPECIALS))
    dtype = np.dtype(manifest["dtype"])
    splits = {}
    for name in SPLITS:
        shards = [Shard(**shard) for shard in manifest["splits"][name]["shards"]]
        for shard in shards:
            _check_shard(path, shard, dtype, vocab.size)
        splits[name] = Split(name, path, dtype, shards) if sum(s.documents for s in shards) else None
    return Corpus(path, manifest, vocab, **splits)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a prepared corpus. UserError where there is none, it is damaged or of another format."""
    file = path / "manifest.json"
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        found = "there is no such directory" if not path.exists() else "this is not a prepared corpus: no manifest.json"
        how = "python scripts/prepare.py data/sample.yaml, or with a file for your own text (data/README.md)"
        raise UserError(found, str(path), f"prepare it: {how}") from error
    except OSError as error:
        with explained(file):
            raise error
    try:
        manifest = json.loads(content)
        version = manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged("the manifest is damaged", file) from error
    if version != FORMAT:
        raise _damaged(f"the corpus has format {version}, this version of pkm reads {FORMAT}", file)
    try:
        intact = manifest["fingerprint"] == fingerprint_of(manifest)
    except (KeyError, TypeError):
        intact = False
    if not intact:
        raise _damaged("the manifest is damaged: its fingerprint does not fit", file)
    return manifest


def _damaged(what: str, file: Path) -> UserError:
    return UserError(what, str(file), "prepare the corpus again")


def vocab_size_of(path: Path) -> int | None:
    """Vocabulary size of a prepared corpus, special ids included; None if there is none at `path`. Nothing is verified."""
    size = (read_json(path / "manifest.json") or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def _check_shard(path: Path, shard: Shard, dtype: np.dtype, vocab_size: int) -> None:
    for suffix, expected in ((".bin", shard.tokens * dtype.itemsize), (".idx", shard.documents * START.itemsize)):
        file = path / (shard.file + suffix)
        with explained(file):
            found = os.stat(file).st_size
        if found != expected:
            raise _damaged(f"the shard has {found} bytes, its manifest says {expected}", file)
    if shard.tokens and shard.max_id >= vocab_size:
        raise UserError(
            f"the vocabulary has {vocab_size} entries, but the corpus holds id {shard.max_id}",
            str(path / "vocab"),
            "restore the vocabulary that the corpus was prepared with, or prepare the corpus again",
        )


def verify(corpus: Corpus) -> None:
    """Hash every shard against the manifest. UserError that names the first one that differs."""
    for name in SPLITS:
        for shard in corpus.manifest["splits"][name]["shards"]:
            for suffix, key in ((".bin", "bin_sha256"), (".idx", "idx_sha256")):
                file = corpus.path / (shard["file"] + suffix)
                if sha256(file) != shard[key]:
                    raise _damaged("the shard is damaged: its hash differs", file)


class ShardWriter:
    """Writes one shard. Encode a document into `ids`, then call `end_document`; `close` gives both files their names.

    Until then they have temporary ones, so a shard is there whole or not at all. Memory: `FLUSH_TOKENS` ids.
    """

    def __init__(self, directory: Path, name: str, vocab_size: int):
        self.directory, self.name = directory, name
        self.dtype = id_type(vocab_size)
        self.ids = array("H" if self.dtype.itemsize == 2 else "I")
        self.documents = self.words = self.bytes = self.tokens = self.unknown = 0
        self.max_id = -1
        self._starts = array("Q")
        self._start = 0
        self._files = [NewFile(directory / f"{name}.{suffix}") for suffix in ("bin", "idx")]
        self._hashes = [hashlib.sha256(), hashlib.sha256()]

    def end_document(self, words: int, size: int) -> None:
        """The ids appended since the last call are one document of `words` Moses words and `size` bytes of text."""
        self._starts.append(self._start)
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
        self.unknown += int(np.count_nonzero(values == UNK_ID))
        starts = np.frombuffer(self._starts, "Q") if self._starts else np.empty(0, START)
        contents = values.astype(self.dtype).tobytes(), starts.astype(START).tobytes()
        for file, digest, content in zip(self._files, self._hashes, contents, strict=True):
            file.write(content)
            digest.update(content)
        # New arrays: numpy's views above forbid shrinking the old ones.
        self.ids = array(self.ids.typecode)
        self._starts = array("Q")

    def close(self) -> Shard:
        """Finish the shard and publish its files, durable."""
        self._flush()
        for file in self._files:
            file.publish()
        with explained(self.directory):
            fsync_directory(self.directory)
        counts = self.documents, self.words, self.tokens, self.bytes, self.max_id
        bin_sha256, idx_sha256 = (digest.hexdigest() for digest in self._hashes)
        return Shard(self.name, *counts, bin_sha256, idx_sha256, self.unknown)

    def discard(self) -> None:
        """Remove what was written."""
        for file in self._files:
            file.discard()


def write_manifest(
    path: Path, shards: dict[str, list[Shard]], vocab: Vocab, tokenizer: dict[str, Any], about: dict[str, Any]
) -> dict[str, Any]:
    """Write manifest.json beside codes, vocab and the shards; `about` is kept as it is (settings, what was dropped)."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "tokenizer": tokenizer,
        "dtype": id_type(vocab.size).str,
        "vocab_size": vocab.size,
        "codes": {"sha256": sha256(path / "codes")},
        "vocab": {"sha256": sha256(path / "vocab"), "specials": list(vocab.specials)},
        "splits": {},
    }
    for name in SPLITS:
        counts = {key: sum(getattr(s, key) for s in shards[name]) for key in ("documents", "words", "tokens", "bytes")}
        manifest["splits"][name] = {**counts, "shards": [asdict(shard) for shard in shards[name]]}
    manifest |= about
    manifest["fingerprint"] = fingerprint_of(manifest)
    atomic_write(path / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    return manifest
