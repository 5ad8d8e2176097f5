"""The four kinds of work that run in parallel: unpack, read, count, encode. Each is a function of (work directory, rank).

work/config.json         the settings
work/unpack.json         large compressed files, and how large their chunks should be
work/unpack/             chunks of large compressed files, one task a file
work/units.jsonl         what each read task reads
work/read/00007.docs     kept articles of unit 7, .npy their hashes and sizes, .json what was dropped and why
work/decide/00007.npy    what becomes of them (assign.Assignment)
work/mixture.json        what is taken of each source, where they have weights
work/groups.json         consecutive units that make one shard
work/count/00003.words   words of group 3's share of the sample
work/learn/              codes and vocab, or tokenizer.json
work/encode/00003.npz    held-out articles of group 3, .json its shard
work/corpus/             the corpus, until it is published
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from pkm.corpus.store import id_type
from pkm.corpus.writer import ShardWriter
from pkm.errors import UserError
from pkm.files import NewFile, atomic_write, explained
from pkm.format import printable
from pkm.prepare.assign import STAY_OUT, Assignment
from pkm.prepare.filters import Filter
from pkm.prepare.input import extract
from pkm.prepare.input.ids import read_ids
from pkm.prepare.input.readers import read_piece
from pkm.prepare.input.records import Damaged, Found, Skipped, too_large
from pkm.prepare.input.sources import Input, Piece
from pkm.prepare.input.streams import line_runs, open_text
from pkm.prepare.settings import PrepareConfig, Tokenizer
from pkm.prepare.spool import SPOOLED_ID, SpoolWriter, spooled, spooled_index
from pkm.prepare.stage import Tick
from pkm.prepare.subwords import AnyEncoder, encoder_of, given_ids
from pkm.text.encode import Encoder
from pkm.text.library import LibraryEncoder

UP_TO_BLANK_LINE = re.compile(rb".*\n[ \t\r\v\f]*\n", re.DOTALL)
"""The last of several."""

BATCH_BYTES = 1 << 19
"""Of texts that the library gets at a time: what it makes of them takes some 40 times as many bytes."""

NAMED = 20
"""Damaged records that a task names; the others are counted."""

LONGEST_TEXT = 500
"""Characters of where and why that are kept."""


def load_config(work: Path) -> PrepareConfig:
    return PrepareConfig.model_validate_json((work / "config.json").read_bytes())


def save_units(work: Path, units: Iterable[list[Piece]]) -> None:
    # ASCII, so that names of files that are not UTF-8 come back as they were.
    lines = (json.dumps([asdict(piece) for piece in unit]) for unit in units)
    atomic_write(work / "units.jsonl", "".join(f"{line}\n" for line in lines))


def load_units(work: Path) -> Iterator[list[Piece]]:
    """What each read task reads, one after the other."""
    with open(work / "units.jsonl", encoding="utf-8") as file:
        yield from map(_unit, file)


def _unit(line: str) -> list[Piece]:
    return [Piece(Input(**piece.pop("file")), **piece) for piece in json.loads(line)]


@dataclass
class Tally:
    """What a task met and what it skipped: the most of its report."""

    records: int = 0
    words: int = 0
    lost_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    named: list[list[str]] = field(default_factory=list)

    def skip(self, found: Skipped) -> None:
        self.dropped[found.kind] += found.records
        self.lost_bytes += found.lost
        if found.kind == "not_an_article":
            return
        self.records += found.records
        if len(self.named) < NAMED:
            self.named.append([found.kind, printable(found.where[:LONGEST_TEXT]), printable(found.why[:LONGEST_TEXT])])


def unpack(work: Path, rank: int, tick: Tick) -> dict[str, Any]:
    """Hand out the text of a large compressed file: chunks that end where a record ends, compressed lightly."""
    config = load_config(work)
    plan = json.loads((work / "unpack.json").read_bytes())
    file, target = Input(**plan["files"][rank]), plan["target"]
    limit = int(config.limits.document_megabytes * 2**20)
    tally = Tally()
    chunks: list[dict[str, Any]] = []
    raw, stream = open_text(file.url, file.format)
    block_bytes = max(1 << 10, min(1 << 20, target // 4))
    with raw:
        chunk = _Chunk(work, rank, 0, 0)
        # Of a document that has not ended: it is lost where the file breaks off.
        begun = b""
        try:
            for offset, run in line_runs(stream, limit, block_bytes):
                if run is None:
                    tally.skip(too_large(f"{file.url}, byte {offset}", limit))
                    # The document that this line was a part of ends here.
                    run = b"\n"
                begin, run = offset - len(begun), begun + run
                cut = _cut(run, file)
                end = cut or (len(run) if len(run) > limit else 0)
                chunk.write(run[:end])
                begun = run[end:]
                if cut and chunk.size >= target:
                    chunks.append(chunk.close())
                    chunk = _Chunk(work, rank, len(chunks), begin + cut)
                tick(raw.tell() / max(file.size, 1), 0)
            chunk.write(begun)
        except Damaged as error:
            where = f"{file.url}, byte {chunk.offset + chunk.size}"
            tally.skip(Skipped("damaged", where, str(error), max(0, file.size - stream.tell())))
        chunks.append(chunk.close())
    return {**vars(tally), "chunks": chunks}


def _cut(run: bytes, file: Input) -> int:
    """How many bytes of some whole lines may end a chunk: those up to the last end of a record; 0 if none ends there."""
    if file.format == "text" and file.documents == "blank":
        upto = UP_TO_BLANK_LINE.match(run)
        return upto.end() if upto else 0
    return len(run)


class _Chunk:
    """A part of a file's text, written beside the others."""

    def __init__(self, work: Path, rank: int, number: int, offset: int):
        self.offset, self.size = offset, 0
        self._file = NewFile(work / "unpack" / f"{rank:05d}-{number:05d}.zst")
        self._stream = zstandard.ZstdCompressor(level=1).stream_writer(self._file.file, closefd=False)

    def write(self, lines: bytes) -> None:
        with explained(self._file.path):
            self._stream.write(lines)
        self.size += len(lines)

    def close(self) -> dict[str, Any]:
        with explained(self._file.path):
            self._stream.close()
        self._file.publish()
        return {"path": str(self._file.path), "offset": self.offset, "size": self.size}


def read(work: Path, rank: int, tick: Tick) -> dict[str, Any]:
    """Read a unit's pieces, filter its articles, and spool those that stay."""
    config = load_config(work)
    with open(work / "units.jsonl", encoding="utf-8") as lines_of_units:
        pieces = _unit(next(islice(lines_of_units, rank, None)))
    limit = int(config.limits.document_megabytes * 2**20)
    tally = Tally()
    spool = SpoolWriter(work / "read" / f"{rank:05d}")
    total, done = max(1, sum(piece.text_bytes for piece in pieces)), 0
    if config.ids_given:
        _read_ids(config, pieces, tally, spool, tick)
        spool.close()
        return {**vars(tally), "documents": spool.documents, "bytes": spool.bytes}
    judge = Filter(config.filters)
    for piece in pieces:
        seen = 0
        for found in _found(piece, limit):
            if isinstance(found, Skipped):
                tally.skip(found)
                continue
            tally.records += 1
            words = len(found.split())
            reason = judge.reason_to_drop(found, words)
            if reason is not None:
                tally.dropped[reason] += 1
            else:
                text = found.replace("\r\n", "\n").replace("\r", "\n")
                spool.add(text.encode("utf-8"), _identity(text, config.tokenizer))
                tally.words += words
            seen += len(found)
            tick((done + min(seen, piece.text_bytes)) / total, tally.words)
        done += piece.text_bytes
    spool.close()
    extract.close()
    return {**vars(tally), "documents": spool.documents, "bytes": spool.bytes}


def _read_ids(config: PrepareConfig, pieces: list[Piece], tally: Tally, spool: SpoolWriter, tick: Tick) -> None:
    """As `read`, of text that is tokenised already: ids are put aside; filters read what the tokenizer makes of them."""
    given = given_ids(config)
    judge = Filter(config.filters) if isinstance(given, LibraryEncoder) else None
    limit = int(config.limits.document_megabytes * 2**20) // SPOOLED_ID.itemsize
    total = max(1, sum(piece.text_bytes for piece in pieces))
    for piece in pieces:
        for document in read_ids(piece, given.size, given.end_id, limit):
            tally.records += 1
            reason = None
            if isinstance(given, LibraryEncoder) and judge is not None:
                text = given.decode(document.ids.tolist())
                words = len(text.split())
                reason = judge.reason_to_drop(text, words)
                tally.words += 0 if reason else words
            if reason is not None:
                tally.dropped[reason] += 1
            else:
                spool.add(document.ids.astype(SPOOLED_ID).tobytes())
            tick(spool.bytes / total, tally.words)


def _identity(text: str, tokenizer: Tokenizer) -> bytes:
    """The bytes by which duplicates are told: what the tokenizer reads of an article."""
    from pkm.text.chunks import without_odd_spaces
    from pkm.text.normalize import normalize_xlm

    return without_odd_spaces(normalize_xlm(text) if tokenizer.normalize else text).encode("utf-8")


def _found(piece: Piece, limit: int) -> Iterator[Found]:
    """What a piece holds. An error of the file system or the network ends the preparation, not just the file."""
    try:
        yield from read_piece(piece, limit)
    except OSError as error:
        fix = "run the same command again when it can be read: it goes on where it was"
        raise UserError(f"reading failed: {error}", piece.file.url, fix) from error


def load_groups(work: Path) -> list[tuple[int, int, int]]:
    """(first unit, last unit + 1, bytes for training) of every shard."""
    return json.loads((work / "groups.json").read_bytes())


def _group(work: Path, rank: int, assignments: Sequence[Assignment]) -> Iterator[tuple[bytes, int, np.void]]:
    """(content, assignment, index entry) of the articles of a group's units that have one of `assignments`, in input order."""
    first, last, _ = load_groups(work)[rank]
    for unit in range(first, last):
        decided = np.load(work / "decide" / f"{unit:05d}.npy")
        wanted = np.isin(decided, assignments)
        if wanted.any():
            stem = work / "read" / f"{unit:05d}"
            index = spooled_index(stem)
            for number, content in spooled(stem, wanted):
                yield content, int(decided[number]), index[number]


def sample_texts(work: Path) -> Iterator[str]:
    """The texts that subwords are learned from, in input order."""
    for rank in range(len(load_groups(work))):
        for content, _, _ in _group(work, rank, (Assignment.SAMPLE,)):
            yield content.decode("utf-8")


def count(work: Path, rank: int, tick: Tick) -> dict[str, Any]:
    """Count the words of a group's share of the sample."""
    from pkm.text.moses import WordCounter
    from pkm.text.other_tokenizers import sacremoses_tokens

    tokenizer = load_config(work).tokenizer
    other = sacremoses_tokens(tokenizer.escape) if tokenizer.backend == "sacremoses" else None
    counter = WordCounter(tokenizer.escape, tokenizer.normalize, line_tokens=other)
    chunks = done = 0
    total = max(1, load_groups(work)[rank][2])
    for content, _, entry in _group(work, rank, (Assignment.SAMPLE,)):
        chunks += counter.add(content.decode("utf-8"))
        done += int(entry["bytes"])
        tick(done / total, chunks)
    counts = counter.words()
    path = work / "count" / f"{rank:05d}.words"
    content = "".join(f"{word} {number}\n" for word, number in sorted(counts.items())).encode()
    atomic_write(path, zstandard.ZstdCompressor(level=3).compress(content))
    return {"words": sum(counts.values())}


def encode(work: Path, rank: int, tick: Tick) -> dict[str, Any]:
    """Encode a group: its training articles are one shard; its held-out ones are kept aside with their hashes."""
    config = load_config(work)
    encoder = encoder_of(config, work / "learn")
    writer = shard_writer(work / "corpus", f"train-{rank:05d}", encoder)
    held: list[tuple[np.void, int, int, int, array]] = []
    total, done = load_groups(work)[rank][2], 0
    try:
        group = _group(work, rank, [kind for kind in Assignment if kind not in STAY_OUT])
        for ids, words, size, assignment, entry in _encoded(encoder, group, writer.ids.typecode, config.ids_given):
            if assignment in (Assignment.VALID, Assignment.TEST):
                held.append((entry, assignment, words, size, ids))
            else:
                writer.ids.extend(ids)
                writer.end_document(words, size)
                done += int(entry["bytes"])
            tick(done / max(total, 1), writer.words)
        _save_held(work / "encode" / f"{rank:05d}.npz", held, encoder.size)
        shard = writer.close()
    except BaseException:
        writer.discard()
        raise
    return {"shard": asdict(shard), "words": shard.words + sum(h[2] for h in held), "documents": shard.documents}


def shard_writer(directory: Path, name: str, encoder: AnyEncoder) -> ShardWriter:
    """A writer of ids that an encoder makes."""
    counts_words = isinstance(encoder, LibraryEncoder)
    return ShardWriter(directory, name, encoder.size, encoder.unknown_id, counts_words)


def _encoded(
    encoder: AnyEncoder, group: Iterator[tuple[bytes, int, np.void]], typecode: str, ids_given: bool
) -> Iterator[tuple[array, int, int, int, np.void]]:
    """(ids, words, bytes of text, assignment, index entry) of (content, assignment, index entry).

    One by one, or many to a call of the library. Of ids without a tokenizer there are no words and no text.
    """
    if ids_given:
        for content, assignment, entry in group:
            found = np.frombuffer(content, SPOOLED_ID).tolist()
            text = encoder.decode(found) if isinstance(encoder, LibraryEncoder) else ""
            ids = array(typecode, [*found, encoder.end_id])
            yield ids, len(text.split()), len(text.encode()), assignment, entry
    elif isinstance(encoder, LibraryEncoder):
        # A worker is one core.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        for together in _batches(group):
            encoded = encoder.encode_batch([content.decode("utf-8") for content, _, _ in together])
            for (library_ids, words), (content, assignment, entry) in zip(encoded, together, strict=True):
                yield array(typecode, library_ids), words, len(content), assignment, entry
    elif isinstance(encoder, Encoder):
        for content, assignment, entry in group:
            ids = array(typecode)
            words = encoder.encode(content.decode("utf-8"), ids)
            yield ids, words, len(content), assignment, entry


def _batches(group: Iterator[tuple[bytes, int, np.void]]) -> Iterator[list[tuple[bytes, int, np.void]]]:
    """A group's documents, so many at a time that they have about BATCH_BYTES."""
    together, size = [], 0
    for one in group:
        together.append(one)
        size += len(one[0])
        if size >= BATCH_BYTES:
            yield together
            together, size = [], 0
    if together:
        yield together


# "fate" is the assignment, under the name of the version whose unfinished preparations are gone on with.
HELD = np.dtype(
    [("high", "<u8"), ("low", "<u8"), ("fate", "u1"), ("words", "<i8"), ("bytes", "<i8"), ("tokens", "<i8")]
)


def _save_held(path: Path, held: list[tuple[np.void, int, int, int, array]], vocab_size: int) -> None:
    rows = [
        (entry["high"], entry["low"], assignment, words, size, len(ids)) for entry, assignment, words, size, ids in held
    ]
    ids = np.concatenate([np.frombuffer(h[4], h[4].typecode) for h in held if len(h[4])] or [np.empty(0)])
    file = NewFile(path)
    with explained(path):
        np.savez(file.file, about=np.array(rows, HELD), ids=ids.astype(id_type(vocab_size)))
    file.publish()


def load_held(work: Path, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """(about, ids) of all held-out articles: HELD entries, and their ids one after the other."""
    about, ids = [np.empty(0, HELD)], [np.empty(0, np.uint16)]
    for rank in range(groups):
        path = work / "encode" / f"{rank:05d}.npz"
        with explained(path), np.load(path) as held:
            about.append(held["about"])
            ids.append(held["ids"])
    return np.concatenate(about), np.concatenate(ids)
