"""Ids in Megatron's files: a .bin with those of one document after the other, and beside it an .idx that says where they are.

The index: MMIDIDX, version, type of an id; for each sequence its length and where it begins in the .bin; for each document its
first sequence, and one more (megatron/core/datasets/indexed_dataset.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from pkm.errors import UserError
from pkm.prepare.input.streams import exactly, open_raw

MAGIC, VERSION = b"MMIDIDX\0\0", 1
HEAD = np.dtype([("magic", "S9"), ("version", "<u8"), ("type", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
TYPES = {code: np.dtype(f"<{name}") for code, name in {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}.items()}


def count_documents(url: str) -> int:
    """Documents of a .bin with its .idx. UserErrors as `documents`."""
    with open_raw(index_of(url)) as raw:
        return int(_head(raw, index_of(url))["documents"]) - 1


def index_of(url: str) -> str:
    return url.removesuffix(".bin") + ".idx"


def _head(raw: BinaryIO, url: str) -> np.void:
    data = exactly(raw, HEAD.itemsize, url, 0)
    head = np.frombuffer(data, HEAD)[0]
    if data[:9] != MAGIC:
        raise UserError(
            "it does not begin as an index of Megatron's (MMIDIDX)", f"{url}, byte 0", "give another format"
        )
    if head["version"] != VERSION:
        what = f"it is of version {head['version']}; known is {VERSION}"
        raise UserError(what, f"{url}, byte 9", "write it anew with Megatron's preprocess_data.py")
    if int(head["type"]) not in TYPES:
        what = f"its ids are of type {head['type']}, which is no type of integers"
        raise UserError(what, f"{url}, byte 17", "write it anew with Megatron's preprocess_data.py")
    return head


def documents(url: str, size: int, first: int, stop: int | None) -> Iterator[tuple[int, np.ndarray]]:
    """(number, ids) of documents [first, stop) of a .bin of `size` bytes; stop None: to the last."""
    index = index_of(url)
    with open_raw(index) as raw:
        head = _head(raw, index)
        kind, position = TYPES[int(head["type"])], HEAD.itemsize
        arrays = []
        for count, of in ((head["sequences"], "<i4"), (head["sequences"], "<i8"), (head["documents"], "<i8")):
            width = int(count) * np.dtype(of).itemsize
            arrays.append(np.frombuffer(exactly(raw, width, index, position), of))
            position += width
    lengths, pointers, starts = arrays
    _check(lengths, pointers, starts, kind.itemsize, size, url)
    stop = len(starts) - 1 if stop is None else stop
    with open_raw(url) as raw:
        for number in range(first, stop):
            parts = []
            for sequence in range(int(starts[number]), int(starts[number + 1])):
                begin = int(pointers[sequence])
                parts.append(np.frombuffer(exactly(raw, int(lengths[sequence]) * kind.itemsize, url, begin), kind))
            if parts:
                yield number, np.concatenate(parts)


def _check(lengths: np.ndarray, pointers: np.ndarray, starts: np.ndarray, width: int, size: int, url: str) -> None:
    """UserError where an index does not fit itself or its .bin."""
    index, where = index_of(url), HEAD.itemsize
    if len(lengths) and lengths.min() < 0:
        raise UserError(f"sequence {lengths.argmin()} has a negative length", f"{index}, byte {where}", "write it anew")
    ends = pointers + lengths.astype(np.int64) * width
    if len(ends) and (pointers.min() < 0 or ends.max() > size):
        last = int(ends.argmax()) if pointers.min() >= 0 else int(pointers.argmin())
        what = f"sequence {last} is said to end at byte {ends[last]}, beyond the {size} bytes that there are"
        raise UserError(what, f"{url}, byte {size}", "copy both files again: .bin and .idx belong together")
    if not len(starts) or starts[0] != 0 or starts[-1] != len(lengths) or (np.diff(starts) < 0).any():
        what = f"its documents do not cover its {len(lengths)} sequences in order"
        raise UserError(
            what, f"{index}, byte {where + 12 * len(lengths)}", "write it anew with Megatron's preprocess_data.py"
        )
