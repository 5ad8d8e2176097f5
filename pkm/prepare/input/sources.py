"""What there is to read: from the paths of a config to files, and from files to pieces that can be read apart.

Neither depends on who reads: the same files give the same pieces in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from pkm.errors import UserError
from pkm.files import refusal
from pkm.prepare.input.streams import ENDINGS, Compression, compression_of, filesystem
from pkm.prepare.settings import PrepareConfig, Source

MIB = 1 << 20
FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".warc": "warc",
    ".wet": "warc",
}
# News text compresses about so well: for estimates, and to cut compressed and plain files alike.
RATIO = 4
PIECES = 64
SMALLEST_PIECE, LARGEST_PIECE = 4 * MIB, 64 * MIB
FILES_OF_A_UNIT = 5000


@dataclass(frozen=True)
class Input:
    """One file. `size` in bytes as it lies there; `stamp` is its time of change where the file system tells."""

    url: str
    size: int
    stamp: str
    format: str
    compression: Compression | None
    documents: str
    column: str

    @property
    def text_bytes(self) -> int:
        """About how many bytes it holds, unpacked."""
        return self.size * (RATIO if self.compression or self.format == "parquet" else 1)


@dataclass(frozen=True)
class Piece:
    """A part of a file that one worker reads: the records that begin in bytes (Parquet: row groups) [start, stop).

    chunk, chunk_bytes: to be read instead: an unpacked part of the file; `start` is then its offset in the file's text.
    share: part of the file that it is.
    """

    file: Input
    start: int = 0
    stop: int | None = None
    chunk: str | None = None
    chunk_bytes: int = 0
    share: float = 1.0

    @property
    def text_bytes(self) -> int:
        """About how many bytes of text it holds."""
        return self.chunk_bytes if self.chunk else int(self.file.text_bytes * self.share)


def list_inputs(config: PrepareConfig) -> list[Input]:
    """All files of all sources, in the order of the config and by name within a source; none twice.

    UserError for a path where nothing is, or a file whose kind its name does not tell.
    """
    found: dict[str, Input] = {}
    for number, source in enumerate(config.sources):
        for path in (source.path,) if isinstance(source.path, str) else source.path:
            for file in _list_path(path, source, f"sources[{number}].path"):
                found.setdefault(file.url, file)
    return list(found.values())


def _list_path(path: str, source: Source, where: str) -> list[Input]:
    fs, inner = filesystem(path)
    pattern = any(c in inner for c in "*?[") and not fs.exists(inner)
    try:
        if pattern:
            entries = [e for e in fs.glob(inner, detail=True).values() if e["type"] == "file"]
            if PurePosixPath(inner).name[:1] not in "._":
                entries = [e for e in entries if PurePosixPath(e["name"]).name[:1] not in "._"]
        elif fs.isdir(inner):
            found = _walk(fs, inner) if "file" in _protocols(fs) else fs.find(inner, detail=True).values()
            entries = [entry for entry in found if not _hidden(entry["name"], inner)]
        else:
            entries = [fs.info(inner)]
    except FileNotFoundError as error:
        raise UserError(f"there is no file or folder {path!r}", where, "check the path") from error
    except OSError as error:
        raise refusal(error, path) from error
    several = pattern or len(entries) != 1 or entries[0]["name"] != inner
    inputs = [_input(fs, entry, path, source, where, several) for entry in sorted(entries, key=lambda e: e["name"])]
    known = [file for file in inputs if file is not None]
    if not known:
        what = f"{path!r} holds no files of a known kind" if entries else f"nothing matches {path!r}"
        raise UserError(what, where, f"check the path, or give `format:` (known endings: {', '.join(FORMATS)})")
    return known


def _walk(fs: Any, folder: str) -> Iterator[dict[str, Any]]:
    """Files in a local folder. fsspec's own walk passes over, in silence, what may not be read."""

    def stop(error: OSError) -> None:
        raise error

    for directory, _, names in os.walk(folder, onerror=stop):
        yield from (fs.info(os.path.join(directory, name)) for name in names)


def _hidden(name: str, folder: str) -> bool:
    """Files like _SUCCESS and .part are the marks of other programs."""
    return any(part[:1] in "._" for part in PurePosixPath(name[len(folder) :].lstrip("/")).parts)


def _input(fs: Any, entry: dict[str, Any], path: str, source: Source, where: str, several: bool) -> Input | None:
    """The file of a listing's entry; None for one of unknown kind among several."""
    name = entry["name"]
    url = fs.unstrip_protocol(name)
    if "::" in path:
        # A file inside another (zip://inner.jsonl::outer.zip).
        url = f"{path.partition('://')[0]}://{name}::{path.partition('::')[2]}"
    elif "file" in _protocols(fs):
        # As the config says it, so that a corpus is the same corpus in a checkout elsewhere.
        url = name if os.path.isabs(os.path.expanduser(path)) else os.path.relpath(name)
    compression = _compression(fs, name)
    endings = PurePosixPath(name.lower()).suffixes
    format: str = source.format
    if format == "auto":
        kinds = [FORMATS[ending] for ending in reversed(endings) if ending in FORMATS]
        if not kinds:
            if several:
                return None
            fix = f"give `format:` (endings known by themselves: {', '.join(FORMATS)})"
            raise UserError(f"the name does not tell what kind of file {name!r} is", where, fix)
        format = kinds[0]
    size = int(entry.get("size") or 0)
    stamp = str(entry.get("mtime") or entry.get("LastModified") or entry.get("ETag") or "")
    return Input(url, size, stamp, format, compression, source.documents, source.column)


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _compression(fs: Any, name: str) -> Compression | None:
    """By the first bytes where that is cheap, by the ending on remote file systems."""
    if "file" in _protocols(fs):
        try:
            with open(name, "rb") as file:
                return compression_of(file.read(6))
        except OSError as error:
            raise refusal(error, name) from error
    return ENDINGS.get(PurePosixPath(name.lower()).suffix)


def piece_bytes(inputs: list[Input]) -> int:
    """Bytes of text a piece should hold: many pieces for little text, fewer than thousands for a lot."""
    return max(SMALLEST_PIECE, min(LARGEST_PIECE, sum(file.text_bytes for file in inputs) // PIECES))


def needs_unpacking(file: Input, target: int) -> bool:
    """Whether one reader has to hand out the file's text to the others: large, and readable only from its start."""
    lines = file.format == "jsonl" or (file.format == "text" and file.documents != "file")
    return lines and file.compression is not None and file.text_bytes > 2 * target


def pieces_of(file: Input, target: int) -> list[Piece]:
    """A file as pieces of about `target` bytes where it can be read from within, else whole."""
    if file.format == "parquet":
        return _row_groups(file, target)
    splits = file.format in ("jsonl", "warc") or (file.format == "text" and file.documents != "file")
    # Web archives compress each record by itself, so a reader can start at any record.
    packed = file.compression is not None and not (file.format == "warc" and file.compression == "gz")
    step = target // RATIO if file.compression else target
    if not splits or packed or file.size <= 2 * step:
        return [Piece(file)]
    share = step / file.size
    return [Piece(file, start, min(start + step, file.size), share=share) for start in range(0, file.size, step)]


def _row_groups(file: Input, target: int) -> list[Piece]:
    if file.text_bytes <= 2 * target:
        return [Piece(file)]
    import pyarrow.parquet
    from pyarrow import ArrowException

    from pkm.prepare.input.streams import open_raw

    try:
        with open_raw(file.url) as raw:
            groups = pyarrow.parquet.read_metadata(raw).num_row_groups
    except (ArrowException, OSError):
        # The reader meets the same damage and reports it.
        return [Piece(file)]
    step = max(1, round(groups * target / file.text_bytes))
    # Row groups of one file are about equally large.
    return [Piece(file, start, min(start + step, groups), share=step / groups) for start in range(0, groups, step)]


def units_of(pieces: Iterable[Piece], target: int) -> list[list[Piece]]:
    """Consecutive pieces, bundled so that a unit has about `target` bytes of text: what one task reads."""
    units: list[list[Piece]] = []
    size = target
    for piece in pieces:
        if not units or size + piece.text_bytes > target or len(units[-1]) >= FILES_OF_A_UNIT:
            units.append([])
            size = 0
        units[-1].append(piece)
        size += piece.text_bytes
    return units
