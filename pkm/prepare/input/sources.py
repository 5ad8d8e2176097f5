"""What there is to read: from the paths of a config to files, and from files to pieces that can be read apart.

Neither depends on who reads: the same files give the same pieces in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from pkm.errors import UserError
from pkm.files import refusal
from pkm.format import printable
from pkm.prepare.input.compression import ENDINGS, HEAD_BYTES, Compression, compression_of
from pkm.prepare.input.listing import BROKEN, NAMED_TWICE, Found, LeftOut, files_at
from pkm.prepare.input.megatron import count_documents
from pkm.prepare.input.streams import filesystem
from pkm.prepare.settings import IDS, PrepareConfig, Source

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
BIN = ("nanogpt", "llm.c", "megatron")
# Ids are put aside in 4 bytes each, and most files have 2.
IDS_RATIO = 2
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
    source: int = 0
    """Which of the sources it is of, where they are mixed by weight."""

    def identity(self) -> dict[str, Any]:
        """What a preparation follows from."""
        return {key: value for key, value in asdict(self).items() if key != "source" or value}

    @property
    def text_bytes(self) -> int:
        """About how many bytes it holds, unpacked."""
        if self.format in IDS:
            return self.size * IDS_RATIO
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


def list_inputs(config: PrepareConfig, left_out: LeftOut | None = None) -> list[Input]:
    """All files of all sources, in the order of the config and by name within a source; none twice for the same texts.

    A file that two sources read differently (another column, say) is two inputs. Other names of a file, through links,
    are not read again. What is passed over is noted in left_out.
    UserError for a path where nothing is, a link to nothing, or a file whose kind its name does not tell.
    """
    left_out = LeftOut() if left_out is None else left_out
    found: dict[tuple[str, str, str, str], Input] = {}
    for number, source in enumerate(config.sources):
        for path in (source.path,) if isinstance(source.path, str) else source.path:
            for real, file in _list_path(path, source, f"sources[{number}].path", left_out):
                key = (real, file.format, file.documents, file.column)
                if key in found:
                    left_out.add(NAMED_TWICE, f"{file.url} (source {number})")
                found.setdefault(key, replace(file, source=number if config.weights else 0))
    return list(found.values())


def _list_path(path: str, source: Source, where: str, left_out: LeftOut) -> list[tuple[str, Input]]:
    """(where a file lies, the file) for those of a path that are of a known kind."""
    fs, inner = filesystem(path)
    passed = LeftOut()
    try:
        files = files_at(fs, inner, "file" in _protocols(fs), passed)
    except FileNotFoundError as error:
        raise UserError(f"there is no file or folder '{path}'", where, "check the path") from error
    except OSError as error:
        raise refusal(error, error.filename or path) from error
    for name, reason in passed.reasons.items():
        if reason == BROKEN and _format_of(name, source):
            raise UserError("it is a link to nothing", name, "bring back what it leads to, or remove it")
    known: dict[str, Input] = {}
    strange = []
    # A file's own name goes before those of links to it.
    for file in sorted(files, key=lambda file: (file.name != file.real, file.name)):
        format = _format_of(file.name, source)
        if format is None:
            strange.append(file)
        elif file.real in known:
            passed.add(NAMED_TWICE, file.name)
        else:
            known[file.real] = _input(fs, file, path, source, format)
    for file in strange:
        if file.real not in known:
            passed.add(_ending(file.name), file.name)
    if not known:
        if [file.name for file in files] == [inner]:
            fix = f"give `format:` (endings known by themselves: {', '.join(FORMATS)})"
            if source.format in BIN:
                fix = f"name a file .bin: {source.format} has no others, and none that are compressed"
            raise UserError(f"the name does not tell what kind of file '{inner}' is", where, fix)
        what = f"'{path}' holds no files of a known kind" if passed.reasons else f"nothing matches '{path}'"
        why = f" ({passed.line()})" if passed.reasons else ""
        fix = f"check the path, or give `format:` (known endings: {', '.join(FORMATS)})"
        raise UserError(what + why, where, fix)
    left_out.reasons.update(passed.reasons)
    return sorted(known.items(), key=lambda item: item[1].url)


def _format_of(name: str, source: Source) -> str | None:
    """The format that the source says; else what the ending does, behind that of a compression, and nothing in the middle.

    Beside files .bin there are others that belong to them.
    """
    if source.format in BIN:
        return source.format if name.endswith(".bin") else None
    if source.format != "auto":
        return source.format
    endings = PurePosixPath(name.lower()).suffixes
    if endings and endings[-1] in ENDINGS:
        endings.pop()
    return FORMATS.get(endings[-1]) if endings else None


def _ending(name: str) -> str:
    """What a file of no known kind is counted under."""
    endings = PurePosixPath(name.lower()).suffixes
    ending = "".join(endings[-2:] if endings and endings[-1] in ENDINGS else endings[-1:])
    return printable(ending) if ending else "without an ending"


def _input(fs: Any, file: Found, path: str, source: Source, format: str) -> Input:
    url = fs.unstrip_protocol(file.name)
    if "::" in path:
        # A file inside another (zip://inner.jsonl::outer.zip).
        url = f"{path.partition('://')[0]}://{file.name}::{path.partition('::')[2]}"
    elif "file" in _protocols(fs):
        # As the config says it, so that a corpus is the same corpus in a checkout elsewhere.
        url = file.name if os.path.isabs(os.path.expanduser(path)) else os.path.relpath(file.name)
    # Numbers may begin as a compressed file does.
    compression = None if format in IDS else _compression(fs, file.name)
    return Input(url, file.size, file.stamp, format, compression, source.documents, source.column)


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _compression(fs: Any, name: str) -> Compression | None:
    """By the first bytes where that is cheap, by the ending on remote file systems."""
    if "file" in _protocols(fs):
        try:
            with open(name, "rb") as file:
                return compression_of(file.read(HEAD_BYTES))
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
    if file.format in ("parquet", "parquet-ids"):
        return _row_groups(file, target)
    if file.format == "megatron":
        return _documents(file, target)
    splits = file.format in ("jsonl", "warc", "nanogpt", "llm.c") or (
        file.format == "text" and file.documents != "file"
    )
    # Web archives compress each record by itself, so a reader can start at any record.
    packed = file.compression is not None and not (file.format == "warc" and file.compression == "gz")
    step = target // RATIO if file.compression else target // (IDS_RATIO if file.format in IDS else 1)
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


def _documents(file: Input, target: int) -> list[Piece]:
    """A .bin of Megatron's by documents."""
    documents = count_documents(file.url)
    if file.text_bytes <= 2 * target:
        return [Piece(file)]
    step = max(1, round(documents * target / file.text_bytes))
    return [
        Piece(file, start, min(start + step, documents), share=step / documents) for start in range(0, documents, step)
    ]


def _changes_source(units: list[list[Piece]], piece: Piece) -> bool:
    return units[-1][-1].file.source != piece.file.source


def units_of(pieces: Iterable[Piece], target: int) -> list[list[Piece]]:
    """Consecutive pieces, bundled so that a unit has about `target` bytes of text: what one task reads."""
    units: list[list[Piece]] = []
    size = target
    for piece in pieces:
        if (
            not units
            or size + piece.text_bytes > target
            or len(units[-1]) >= FILES_OF_A_UNIT
            or _changes_source(units, piece)
        ):
            units.append([])
            size = 0
        units[-1].append(piece)
        size += piece.text_bytes
    return units
