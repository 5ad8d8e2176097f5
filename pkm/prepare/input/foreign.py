"""Files that are neither text nor compressed text: named for what they are, with what to do."""

from __future__ import annotations

from pkm.prepare.input.buffered import Buffered
from pkm.prepare.input.compression import compression_of
from pkm.prepare.input.records import Damaged

TAR_AT = 257
KINDS: tuple[tuple[bytes, str, str], ...] = (
    (
        b"PK\x03\x04",
        "a ZIP archive",
        "name what is in it: path: zip://*.jsonl::{url} (with its own ending), or unpack it",
    ),
    (b"PK\x05\x06", "an empty ZIP archive", "leave it out"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", "unpack it"),
    (b"Rar!\x1a\x07", "a RAR archive", "unpack it"),
    (b"\x04\x22\x4d\x18", "compressed with LZ4", "unpack it, or compress it with zstd or gzip"),
    (b"\x1f\x9d", "compressed with compress", "unpack it, or compress it with zstd or gzip"),
    (b"]\0\0", "compressed with lzma", "unpack it, or compress it with xz"),
    (b"PAR1\x15", "a Parquet file", "give `format: parquet`"),
    (b"WARC/1.", "a web archive", "give `format: warc`"),
    (b"ARROW1\0\0", "an Arrow file", "write it as Parquet (pyarrow.parquet.write_table)"),
    (b"Obj\x01", "an Avro file", "write it as Parquet or JSON lines"),
    (b"SQLite format 3\0", "an SQLite database", "write its texts as JSON lines"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "write its texts as Parquet or JSON lines"),
    (b"%PDF-", "a PDF", "take its text out first (pdftotext)"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Office document", "save it as plain text"),
)


def foreign(head: bytes, url: str) -> str | None:
    """What the first bytes of something that should be text show it to be, and what to do; None for text."""
    if kind := compression_of(head):
        return f"compressed twice ({kind} once more inside): unpack it once"
    if head[TAR_AT : TAR_AT + 5] == b"ustar":
        return f"a tar archive: name what is in it: path: tar://*.jsonl::{url} (with its own ending), or unpack it"
    found = next((f"{what}: {todo}" for magic, what, todo in KINDS if head.startswith(magic)), None)
    return found and found.replace("{url}", url)


class Refused(Buffered):
    """In place of a file that cannot be read for what it is: says so when it is read."""

    def __init__(self, why: str):
        super().__init__()
        self._why = why

    def tell(self) -> int:
        return 0

    def _more(self, size: int) -> bytes:
        raise Damaged(self._why)
