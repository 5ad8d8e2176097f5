"""A prepared corpus on disk, opened memory-mapped; pkm.corpus.writer writes it.

    manifest.json      format version, tokenizer, hashes, counts, shards, settings, what was dropped
    codes  vocab       the subwords, in fastBPE's formats; or
    tokenizer.json     those of the `tokenizers` library
    train-00000.bin    ids of one shard, little-endian, uint16 where the vocabulary fits, else uint32
    train-00000.idx    where each of its documents starts in it, little-endian uint64, in tokens
    train-00000.words  words of each of its documents, little-endian uint32, where ids do not tell (tokenizer.json)

Each split (train, valid, test) is one long sequence of tokens: its documents in order, across its shards.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pkm.errors import UserError
from pkm.files import explained, read_json, sha256
from pkm.text.vocab import EOS_ID, SPECIALS, UNK_ID, Vocab

if TYPE_CHECKING:
    from pkm.text.encode import Encoder
    from pkm.text.library import LibraryEncoder

FORMAT, OTHER_FORMAT = 1, 2
"""Of a corpus with codes and vocabulary of ours, and of one whose ids are another program's."""

SPLITS = ("train", "valid", "test")
START, COUNT = np.dtype("<u8"), np.dtype("<u4")
TOKENIZER = "tokenizer.json"
MOSES, WHITE_SPACE, UNKNOWN_WORDS = "Moses tokens", "between white space", "not known"
"""What is counted as a word."""
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
    words_sha256: str | None = None
    """Of its .words; None where it has none."""

    def record(self) -> dict[str, Any]:
        """As the manifest has it."""
        return {key: value for key, value in asdict(self).items() if key != "words_sha256" or value is not None}

    def hashes(self) -> dict[str, str]:
        """SHA-256 of each of its files, by the ending."""
        known = {"bin": self.bin_sha256, "idx": self.idx_sha256, "words": self.words_sha256}
        return {suffix: digest for suffix, digest in known.items() if digest is not None}


@dataclass(frozen=True)
class OtherVocab:
    """Ids from 0 to size - 1 that another program gave to pieces of its own.

    end_id       ends every document
    unknown_id   stands for what that program did not know; None if nothing does
    """

    size: int
    end_id: int
    unknown_id: int | None


class Split:
    """The documents of one split as one sequence of token ids. Nothing is read before it is asked for.

    documents, words (as Corpus.words_are says), tokens (subwords and the ends of lines or documents), bytes (UTF-8, of
    the text before tokenizing)
    """

    def __init__(
        self, name: str, path: Path, dtype: np.dtype, shards: Sequence[Shard], unknown_id: int | None = UNK_ID
    ):
        self.name, self.unknown_id = name, unknown_id
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
        return float((first == self.unknown_id).mean()) if len(first) else 0.0

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

    def words_before(self, document: int) -> int:
        """Words of the documents before one, where shards count the words of each (Shard.words_sha256); 0 where they do not."""
        total = 0
        for shard, first in zip(self._shards, self._first_document.tolist(), strict=False):
            if first >= document or shard.words_sha256 is None:
                break
            total += int(self._map(f"{shard.file}.words", COUNT)[: document - first].sum(dtype=np.int64))
        return total

    def document(self, i: int) -> np.ndarray:
        """Token ids of document i, int64."""
        return self.read(self.document_start(i), self.document_start(i + 1))


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus. `fingerprint` names its content: equal if and only if codes, vocabulary and all ids are.

    vocab   pieces and ids where codes and vocabulary are ours, else the ids alone
    """

    path: Path
    manifest: dict[str, Any]
    vocab: Vocab | OtherVocab
    train: Split | None
    valid: Split | None
    test: Split | None

    @property
    def fingerprint(self) -> str:
        return self.manifest["fingerprint"]

    def split(self, name: str) -> Split | None:
        return {"train": self.train, "valid": self.valid, "test": self.test}[name]

    @property
    def unknown_id(self) -> int | None:
        """What stands for text that the vocabulary cannot say; None if nothing does."""
        return self.vocab.unknown_id if isinstance(self.vocab, OtherVocab) else UNK_ID

    @property
    def end_id(self) -> int:
        """What ends every document, with Moses tokens every line."""
        return self.vocab.end_id if isinstance(self.vocab, OtherVocab) else EOS_ID

    @property
    def words_are(self) -> str:
        """What is counted as a word."""
        if isinstance(self.vocab, OtherVocab):
            return WHITE_SPACE if self.decodes else UNKNOWN_WORDS
        return MOSES

    @property
    def decodes(self) -> bool:
        """Whether there is an encoder: not for text that came as ids without a tokenizer."""
        return isinstance(self.vocab, Vocab) or bool(self.manifest["tokenizer"]["library"])

    def encoder(self) -> Encoder | LibraryEncoder:
        """The encoder that made the ids; it also decodes them. UserError for text that came as ids without a tokenizer."""
        if isinstance(self.vocab, OtherVocab):
            if not self.decodes:
                what = "it was prepared from ids, and with what tokenizer they were made is not known"
                raise UserError(what, str(self.path), "prepare it again with subwords.tokenizer")
            from pkm.text.library import LibraryEncoder

            return LibraryEncoder.load(self.path / TOKENIZER, self.manifest["tokenizer"]["end"])
        from pkm.text.bpe import Codes
        from pkm.text.encode import Encoder

        return Encoder(Codes.load(self.path / "codes"), self.vocab, **self.manifest["tokenizer"])


def fingerprint_of(manifest: dict[str, Any]) -> str:
    """SHA-256 over everything that decides the ids: tokenizer, hashes of codes, vocabulary and shards."""
    shards = [[s, x["bin_sha256"], x["idx_sha256"]] for s in SPLITS for x in manifest["splits"][s]["shards"]]
    ours = [manifest["codes"], manifest["vocab"]] if manifest["format"] == FORMAT else []
    content = [manifest["format"], manifest["tokenizer"], *ours, shards]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def open_corpus(path: str | Path) -> Corpus:
    """Open a prepared corpus: milliseconds and a few megabytes, whatever its size.

    Verified: format version, hashes of codes and vocabulary or of tokenizer.json, every shard's size, ids below the
    vocabulary's size.
    UserError where one of these fails. (`scripts/prepare.py --verify` also hashes every shard.)
    """
    path = Path(path)
    manifest = read_manifest(path)
    for name, digest in _subword_files(manifest).items():
        if sha256(path / name) != digest:
            raise _damaged("it was changed after the corpus was prepared", path / name)
    vocab: Vocab | OtherVocab
    if manifest["format"] == FORMAT:
        vocab = Vocab.load(path / "vocab", manifest["vocab"].get("specials", SPECIALS))
    else:
        about = manifest["tokenizer"]
        vocab = OtherVocab(manifest["vocab_size"], about["end_id"], about["unknown_id"])
    unknown_id = UNK_ID if isinstance(vocab, Vocab) else vocab.unknown_id
    dtype = np.dtype(manifest["dtype"])
    splits = {}
    for name in SPLITS:
        shards = [Shard(**shard) for shard in manifest["splits"][name]["shards"]]
        for shard in shards:
            _check_shard(path, shard, dtype, vocab.size)
        splits[name] = Split(name, path, dtype, shards, unknown_id) if sum(s.documents for s in shards) else None
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
    if version not in (FORMAT, OTHER_FORMAT):
        raise _damaged(f"the corpus has format {version}, this version of pkm reads {FORMAT} and {OTHER_FORMAT}", file)
    try:
        intact = manifest["fingerprint"] == fingerprint_of(manifest)
    except (KeyError, TypeError):
        intact = False
    if not intact:
        raise _damaged("the manifest is damaged: its fingerprint does not fit", file)
    return manifest


def _subword_files(manifest: dict[str, Any]) -> dict[str, str]:
    """SHA-256 by name of the files that subwords are made with."""
    if manifest["format"] == FORMAT:
        return {name: manifest[name]["sha256"] for name in ("codes", "vocab")}
    return {TOKENIZER: manifest["tokenizer"]["sha256"]} if manifest["tokenizer"]["library"] else {}


def _damaged(what: str, file: Path) -> UserError:
    return UserError(what, str(file), "prepare the corpus again")


def vocab_size_of(path: Path) -> int | None:
    """Vocabulary size of a prepared corpus, special ids included; None if there is none at `path`. Nothing is verified."""
    size = (read_json(path / "manifest.json") or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def _check_shard(path: Path, shard: Shard, dtype: np.dtype, vocab_size: int) -> None:
    documents = shard.documents
    sizes = {
        "bin": shard.tokens * dtype.itemsize,
        "idx": documents * START.itemsize,
        "words": documents * COUNT.itemsize,
    }
    for suffix in shard.hashes():
        file = path / f"{shard.file}.{suffix}"
        with explained(file):
            found = os.stat(file).st_size
        if found != sizes[suffix]:
            raise _damaged(f"the shard has {found} bytes, its manifest says {sizes[suffix]}", file)
    if shard.tokens and shard.max_id >= vocab_size:
        raise UserError(
            f"the vocabulary has {vocab_size} entries, but the corpus holds id {shard.max_id}",
            str(path / (TOKENIZER if (path / TOKENIZER).exists() else "vocab")),
            "restore the vocabulary that the corpus was prepared with, or prepare the corpus again",
        )


def verify(corpus: Corpus) -> None:
    """Hash every shard against the manifest. UserError that names the first one that differs."""
    for name in SPLITS:
        for shard in corpus.manifest["splits"][name]["shards"]:
            for suffix, digest in Shard(**shard).hashes().items():
                file = corpus.path / f"{shard['file']}.{suffix}"
                if sha256(file) != digest:
                    raise _damaged("the shard is damaged: its hash differs", file)
