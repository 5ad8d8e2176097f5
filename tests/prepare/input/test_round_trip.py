"""Whatever the documents, and however they are written, packed and cut into pieces: the same ones are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.prepare.input import warc
from tests.support.reading import inputs, read
from tests.support.written import PACKS, PARQUET, ending, json_array, json_lines, pages, parquet, wet

SOME = settings(max_examples=150, derandomize=True, deadline=None, database=None)
ANY = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
# Letters alone hardly ever make what a reader could stumble over.
ODD = st.text(st.sampled_from('aé\u2028\x85\ufeff\r\n\t {}[]",\\:<>&\U0001f600'), max_size=40)
TEXT = ANY | ODD
TEXTS = st.lists(TEXT, max_size=12)
PACK, TARGET = st.sampled_from(sorted(PACKS)), st.sampled_from([None, 7, 60, 300])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("written")


def back(folder: Path, name: str, data: bytes, target: int | None = None, **source: str) -> list:
    """What is read of a file."""
    path = folder / name
    path.write_bytes(data)
    try:
        return read(path, target, limit=1 << 20, **source)
    finally:
        path.unlink()


def as_read(text: str) -> str:
    """Marks in front of a text are no part of it."""
    return text.removeprefix("\ufeff").removeprefix("\ufeff")


@SOME
@given(texts=TEXTS, pack=PACK)
def test_a_document_a_file(tmp_path_factory, texts, pack):
    folder = tmp_path_factory.mktemp("files")
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt{ending(pack)}").write_bytes(PACKS[pack](text.encode()))
    if texts:
        assert read(folder) == [text.removeprefix("\ufeff") for text in texts]
        assert [file.documents for file in inputs(str(folder))] == ["file"] * len(texts)


@SOME
@given(texts=TEXTS, pack=PACK, target=TARGET, end=st.sampled_from(["", "\n"]))
def test_a_document_a_line(folder, texts, pack, target, end):
    lines = [line for text in texts for line in text.split("\n")]
    found = back(
        folder, "in.txt" + ending(pack), PACKS[pack](("\n".join(lines) + end).encode()), target, documents="line"
    )
    assert found == [as_read(line) for line in lines if as_read(line).encode().strip()]


@SOME
@given(texts=TEXTS, pack=PACK, target=TARGET, between=st.sampled_from(["\n\n", "\n \n", "\n\r\n\t\n"]))
def test_a_document_between_blank_lines(folder, texts, pack, target, between):
    documents = ["\n".join(line for line in text.split("\n") if as_read(line).encode().strip()) for text in texts]
    documents = [document for document in documents if document]
    found = back(
        folder, "in.txt" + ending(pack), PACKS[pack](between.join(documents).encode()), target, documents="blank"
    )
    assert found == [as_read(re.sub("^\ufeff", "", document, flags=re.MULTILINE)) for document in documents]


@SOME
@given(texts=TEXTS, pack=PACK, target=TARGET, ascii=st.booleans(), encoding=st.sampled_from(["utf-8", "utf-16"]))
def test_json_lines(folder, texts, pack, target, ascii, encoding):
    data = json_lines(texts, ascii).decode().encode(encoding)
    assert back(folder, "in.jsonl" + ending(pack), PACKS[pack](data), target) == [
        t.removeprefix("\ufeff") for t in texts
    ]


@SOME
@given(texts=TEXTS, pack=PACK, target=TARGET, indent=st.sampled_from([None, 0, 2]))
def test_a_json_array(folder, texts, pack, target, indent):
    found = back(folder, "in.json" + ending(pack), PACKS[pack](json_array(texts, indent)), target)
    assert found == [t.removeprefix("\ufeff") for t in texts]


@SOME
@given(
    texts=st.lists(st.none() | TEXT, max_size=12),
    kind=st.sampled_from(sorted(PARQUET)),
    rows=st.integers(1, 5),
    compression=st.sampled_from(["none", "snappy", "zstd", "gzip", "brotli", "lz4"]),
    target=TARGET,
)
def test_a_parquet_column_of_every_type(folder, texts, kind, rows, compression, target):
    found = back(folder, "in.parquet", parquet(texts, kind, rows, compression), target)
    assert found == [(text or "").removeprefix("\ufeff") for text in texts]


@SOME
@given(
    texts=st.lists(TEXT.map(lambda text: text.replace("<", "").replace("\ufeff", "")), max_size=12),
    records=st.sampled_from([wet, pages]),
    pack=PACK,
    each=st.booleans(),
    target=TARGET,
)
def test_records_of_a_web_archive(folder, texts, records, pack, each, target):
    """each: every record is packed by itself."""
    written = records(texts)
    data = b"".join(map(PACKS[pack], written)) if each else PACKS[pack](b"".join(written))
    with pytest.MonkeyPatch.context() as patched:
        # Without what makes an article of a page: its tags only.
        patched.setattr(warc, "extract", lambda page: page.partition("<p>")[2].partition("</p>")[0])
        found = back(folder, "in.warc" + ending(pack), data, target)
    assert [record for record in found if isinstance(record, str)] == texts
    assert {kind for kind, _ in (r for r in found if not isinstance(r, str))} <= {"not_an_article"}
