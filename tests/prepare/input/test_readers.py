"""pkm/prepare/input/readers.py and sources.py: every record once, in order, whatever the format and wherever a file is cut."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.errors import UserError
from pkm.prepare.input import sources
from pkm.prepare.input.readers import read_piece
from pkm.prepare.input.records import Skipped
from pkm.prepare.input.sources import Input, Piece, list_inputs, pieces_of, units_of
from pkm.prepare.settings import PrepareConfig

LIMIT = 1000
FEW = settings(max_examples=60, deadline=None)


def inputs(path: str, **source) -> list[Input]:
    return list_inputs(PrepareConfig.model_validate({"name": "x", "sources": [{"path": path, **source}]}))


def read(path: Path | str, target: int | None = None, limit: int = LIMIT, **source) -> list:
    """Texts, and (kind, why) of what was skipped, of all pieces of a file one after the other."""
    found = []
    for file in inputs(str(path), **source):
        for piece in pieces_of(file, target) if target else [Piece(file)]:
            found += read_piece(piece, limit)
    return [(record.kind, record.why) if isinstance(record, Skipped) else record for record in found]


@FEW
@given(
    texts=st.lists(st.text(st.sampled_from("ab \n\té\u2028"), max_size=30), max_size=25),
    target=st.integers(1, 60),
    last_newline=st.booleans(),
)
def test_lines_cut_anywhere_are_read_once_and_in_order(tmp_path_factory, texts, target, last_newline):
    path = tmp_path_factory.mktemp("lines") / "in.txt"
    lines = [line for text in texts for line in text.split("\n")]
    content = "\n".join(lines) + "\n" * last_newline
    path.write_bytes(content.encode())
    expected = [line for line in lines if line.encode().strip()]
    assert read(path, target, documents="line") == expected


@FEW
@given(
    lines=st.lists(st.sampled_from(["", "  ", "\t", "one", "two words", "a longer line of text"]), max_size=25),
    target=st.integers(1, 60),
)
def test_documents_between_blank_lines_cut_anywhere_are_read_once_and_whole(tmp_path_factory, lines, target):
    path = tmp_path_factory.mktemp("blank") / "in.txt"
    path.write_text("\n".join(lines))
    expected, document = [], []
    for line in [*lines, ""]:
        if line.strip():
            document.append(line)
        elif document:
            expected.append("\n".join(document))
            document = []
    assert read(path, target, documents="blank") == expected


def test_a_document_with_too_long_a_line_is_too_large_whole(tmp_path: Path):
    path = tmp_path / "in.txt"
    path.write_text("one\n\nbefore\n" + "x" * 2000 + "\nafter\n\n" + "y " * 600 + "\n\nlast")
    large = ("too_large", "larger than 0.000953674 MB")
    assert read(path, documents="blank") == ["one", large, large, "last"]


def test_jsonl_names_line_and_reason_of_what_it_cannot_read(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    lines = [
        b'\xef\xbb\xbf{"text": "begins with a byte order mark"}',
        b"",
        b'{"text": "cut',
        b'{"text": "\xe9"}',
        b'{"body": "x", "title": "y"}',
        b'["text"]',
        b'{"text": 5}',
        b'{"text": null}',
        b'{"text": "' + b"x" * 1000 + b'"}',
        b"[" * 900,
        b'{"text": "good \\u2028 \\n text"}',
    ]
    path.write_bytes(b"\n".join(lines))
    found = [r for f in inputs(str(path)) for r in read_piece(Piece(f), LIMIT)]
    skipped = [r for r in found if isinstance(r, Skipped)]
    assert [r.where.rpartition(":")[2] for r in skipped] == ["3", "4", "5", "6", "7", "9", "10"]
    reasons = ["not JSON", "not UTF-8: byte 0xe9 at 10", "no field 'text': its fields are body, title", "no object"]
    reasons += ["holds no text", "larger than", "not JSON"]
    for record, reason in zip(skipped, reasons, strict=True):
        assert reason in record.why
    assert [r for r in found if isinstance(r, str)] == ["begins with a byte order mark", "", "good \u2028 \n text"]


def test_one_file_is_one_document_without_its_byte_order_mark(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\n\ntwo")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("thr\u00e9e".encode()))
    (tmp_path / "c.txt").write_bytes(b"\xff\xfea\0")
    (tmp_path / "d.txt").write_bytes(b"x" * 1001)
    assert read(tmp_path) == [
        "one\n\ntwo",
        "thrée",
        ("damaged", "not UTF-8: byte 0xff at 0 (it begins like UTF-16)"),
        ("too_large", "larger than 0.000953674 MB"),
    ]


def test_a_truncated_file_gives_what_comes_before_and_one_damage(tmp_path: Path):
    lines = b"".join(json.dumps({"text": f"{i} {i * i}"}).encode() + b"\n" for i in range(30_000))
    packed = zstandard.compress(lines)
    (tmp_path / "in.jsonl.zst").write_bytes(packed[: len(packed) // 2])
    found = read(tmp_path / "in.jsonl.zst")
    assert found[0] == "0 0"
    assert found[-1] == ("damaged", "the file ends in the middle of its zst data")
    assert sum(isinstance(record, tuple) for record in found) <= 2


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """The layout of cc_news, in row groups of 7."""
    rows = {"title": [f"t{i}" for i in range(50)], "text": [f"article {i}" for i in range(50)], "url": [None] * 50}
    rows["text"][3] = None
    rows["text"][4] = "x" * 1001
    pq.write_table(pa.table(rows), tmp_path / "in.parquet", row_group_size=7)
    return tmp_path / "in.parquet"


@pytest.mark.parametrize("target", [None, 300, 1000])
def test_parquet_rows_come_once_and_in_order_from_any_row_groups(parquet, target):
    found = read(parquet, target)
    expected = [f"article {i}" for i in range(50)]
    expected[3], expected[4] = "", ("too_large", "larger than 0.000953674 MB")
    assert found == expected


def test_parquet_is_cut_at_row_groups_when_it_is_large(parquet):
    assert len(pieces_of(inputs(str(parquet))[0], 300)) > 2


def test_damaged_parquet_is_one_damage_a_row_group(parquet, tmp_path: Path):
    content = bytearray(parquet.read_bytes())
    group = pq.read_metadata(parquet).row_group(2).column(1)
    content[group.data_page_offset : group.data_page_offset + 30] = b"\xff" * 30
    parquet.write_bytes(bytes(content))
    found = read(parquet)
    assert sum(isinstance(r, tuple) and r[0] == "damaged" for r in found) == 1
    assert found[-1] == "article 49"
    (tmp_path / "no.parquet").write_bytes(b"PAR1 not really PAR1")
    assert read(tmp_path / "no.parquet")[0][0] == "damaged"


def test_a_parquet_column_that_is_not_there_or_holds_no_text_is_named(parquet, tmp_path: Path):
    with pytest.raises(UserError, match=r"no column 'body'; its columns are title, text, url"):
        read(parquet, column="body")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "n.parquet")
    with pytest.raises(UserError, match="holds int64, not text"):
        read(tmp_path / "n.parquet")


@pytest.mark.parametrize("kind", ["large_string", "binary", "dictionary"])
def test_parquet_text_may_be_stored_in_any_way(tmp_path: Path, kind):
    text = pa.array(["un", "deux", "un"])
    types = {
        "large_string": pa.large_string(),
        "binary": pa.binary(),
        "dictionary": pa.dictionary(pa.int32(), pa.string()),
    }
    pq.write_table(pa.table({"text": text.cast(types[kind])}), tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet") == ["un", "deux", "un"]


def test_a_parquet_bomb_is_skipped_by_its_row_groups_sizes(tmp_path: Path, monkeypatch):
    from pkm.prepare.input import readers

    monkeypatch.setattr(readers, "BOMB_BYTES", 1 << 20)
    table = pa.table({"text": ["\0" * (4 << 20)]})
    pq.write_table(table, tmp_path / "bomb.parquet", compression="zstd", use_dictionary=False)
    found = read(tmp_path / "bomb.parquet")
    assert found[0][0] == "too_large" and "that unpack to" in found[0][1]


def test_files_are_found_by_path_folder_glob_and_list_and_none_twice(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "sub/c.jsonl.gz", "sub/d.unknown", "_SUCCESS", ".hidden.txt", "sub/_part/e.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("x")
    assert [f.url for f in inputs(".")] == ["a.txt", "b.txt", "sub/c.jsonl.gz"]
    assert [f.url for f in inputs("*.txt")] == ["a.txt", "b.txt"]
    assert [f.url for f in inputs(["b.txt", "*.txt"])] == ["b.txt", "a.txt"]
    assert [f.format for f in inputs(".", format="text")] == ["text"] * 4
    assert inputs(str(tmp_path / "a.txt"))[0].url == str(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent.txt", "no file or folder 'absent.txt'"),
        ("absent*.txt", r"nothing matches 'absent\*.txt'"),
        ("odd.xyz", "what kind of file"),
        ("empty", "nothing matches|holds no files"),
        ("odd*", "holds no files of a known kind"),
        ("nosuch://bucket/x.txt", "nosuch"),
    ],
)
def test_a_path_without_files_says_so(tmp_path: Path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    Path("odd.xyz").write_text("x")
    Path("empty").mkdir()
    with pytest.raises(UserError, match=message) as caught:
        inputs(path)
    assert caught.value.fix


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch):
    path = tmp_path / "in.txt"
    path.write_text("x")

    def refuses(*_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuses)
    with pytest.raises(UserError, match="no permission"):
        inputs(str(path))


def test_a_folder_that_may_not_be_read_is_not_passed_over(tmp_path: Path, monkeypatch):
    import os

    (tmp_path / "sub").mkdir()
    (tmp_path / "in.txt").write_text("x")
    scandir = os.scandir

    def refuses(path):
        if str(path).rstrip("/").endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", refuses)
    with pytest.raises(UserError, match="no permission"):
        inputs(str(tmp_path))


def test_compression_is_told_by_the_first_bytes_not_by_the_name(tmp_path: Path):
    (tmp_path / "plain.txt.gz").write_text("not packed")
    (tmp_path / "packed.txt").write_bytes(gzip.compress(b"packed"))
    assert read(tmp_path) == ["packed", "not packed"]


def test_units_bundle_small_files_and_keep_their_order():
    files = [Input(f"{i}", 30, "", "text", None, "file", "text") for i in range(10)]
    units = units_of((Piece(file) for file in files), 100)
    assert [len(unit) for unit in units] == [3, 3, 3, 1]
    assert [piece.file.url for unit in units for piece in unit] == [file.url for file in files]
    assert sources.units_of([], 100) == []
