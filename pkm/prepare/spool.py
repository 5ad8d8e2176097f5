"""Articles between reading and encoding: one compressed file a unit, with an index of their hashes and sizes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zstandard

from pkm.files import NewFile, explained

ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("bytes", "<u4")])
"""An article: the two halves of its 128-bit hash (as one big-endian number) and the bytes of its UTF-8."""


def content_hash(data: bytes) -> tuple[int, int]:
    """(high, low) halves of the BLAKE2b-128 of bytes."""
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")


SPOOLED_ID = np.dtype("<u4")
"""Where the text is tokenised already, its ids are kept instead of UTF-8."""


class SpoolWriter:
    """Writes `<stem>.docs` and `<stem>.npy`; both get their names in `close`."""

    def __init__(self, stem: Path):
        self._documents, self._index = NewFile(stem.with_suffix(".docs")), NewFile(stem.with_suffix(".npy"))
        self._stream = zstandard.ZstdCompressor(level=1).stream_writer(self._documents.file, closefd=False)
        self._hashes = array("Q")
        self._sizes = array("L")
        self.documents = self.bytes = 0

    def add(self, data: bytes, hashed: bytes | None = None) -> None:
        """Keep an article's UTF-8. hashed: the bytes by which duplicates are told, if not the article's own."""
        with explained(self._documents.path):
            self._stream.write(data)
        self._hashes.extend(content_hash(data if hashed is None else hashed))
        self._sizes.append(len(data))
        self.documents += 1
        self.bytes += len(data)

    def close(self) -> None:
        index = np.empty(self.documents, ENTRY)
        hashes = np.array(self._hashes, np.uint64).reshape(-1, 2)
        index["high"], index["low"], index["bytes"] = hashes[:, 0], hashes[:, 1], np.array(self._sizes, np.uint32)
        with explained(self._documents.path):
            self._stream.close()
            np.save(self._index.file, index)
        self._documents.publish()
        self._index.publish()


def spooled_index(stem: Path) -> np.ndarray:
    """The index of a unit's articles, (articles,) of ENTRY, memory-mapped."""
    path = stem.with_suffix(".npy")
    with explained(path):
        # numpy cannot map an empty array.
        return np.load(path, mmap_mode="r" if path.stat().st_size > 256 else None)


def spooled(stem: Path, wanted: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """(number, UTF-8, or ids of SPOOLED_ID) of the articles of a unit where `wanted` (articles,) bool is true, in order."""
    sizes = spooled_index(stem)["bytes"].tolist()
    with explained(stem), open(stem.with_suffix(".docs"), "rb") as file:
        stream = zstandard.ZstdDecompressor().stream_reader(file)
        for number, (size, want) in enumerate(zip(sizes, wanted.tolist(), strict=True)):
            data = stream.read(size)
            if want:
                yield number, data
