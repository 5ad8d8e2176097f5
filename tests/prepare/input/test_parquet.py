"""pkm/prepare/input/parquet.py: a text a row, whatever its type; what cannot be read costs itself, and is counted."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pkm.errors import UserError
from pkm.prepare.input.readers import read_piece
from pkm.prepare.input.records import Skipped
from pkm.prepare.input.sources import Piece, pieces_of
from tests.support.reading import LIMIT, inputs, read
from tests.support.written import PARQUET


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


def test_a_broken_row_group_counts_as_all_its_rows(parquet, tmp_path: Path):
    content = bytearray(parquet.read_bytes())
    group = pq.read_metadata(parquet).row_group(2).column(1)
    content[group.data_page_offset : group.data_page_offset + 30] = b"\xff" * 30
    parquet.write_bytes(bytes(content))
    found = list(read_piece(Piece(inputs(str(parquet))[0]), LIMIT))
    (broken,) = [r for r in found if isinstance(r, Skipped) and r.kind == "damaged"]
    assert (broken.records, broken.lost) == (7, group.total_compressed_size)
    assert broken.where.endswith("row group 2, row 0")
    assert found[-1] == "article 49"
    (tmp_path / "no.parquet").write_bytes(b"PAR1 not really PAR1")
    assert read(tmp_path / "no.parquet")[0][0] == "damaged"


def test_a_page_that_does_not_fit_its_checksum_is_damage_where_the_file_has_any(tmp_path: Path):
    rows = pa.table({"text": [f"article {i}" for i in range(20)]})
    for checksums in (True, False):
        path = tmp_path / f"{checksums}.parquet"
        stored = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        pq.write_table(rows, path, row_group_size=10, write_page_checksum=checksums, **stored)
        content = path.read_bytes()
        path.write_bytes(content.replace(b"article 13", b"artifice 3", 1))
    assert read(tmp_path / "False.parquet")[13] == "artifice 3"
    (damage,) = read(tmp_path / "True.parquet")[10:]
    assert damage[0] == "damaged" and "CRC" in damage[1]


def test_a_name_of_a_column_that_is_not_utf_8_is_damage(parquet):
    """pyarrow reads the schema, and fails where the name is asked for in a row group."""
    content = parquet.read_bytes()
    last = content.rindex(b"text", 0, content.index(b"ARROW:schema"))
    parquet.write_bytes(content[:last] + b"te\xe0t" + content[last + 4 :])
    found = list(read_piece(Piece(inputs(str(parquet))[0]), LIMIT))
    assert sum(r.records if isinstance(r, Skipped) else 1 for r in found) == 50
    assert {r.kind for r in found if isinstance(r, Skipped)} == {"damaged", "too_large"}


def test_a_parquet_column_that_is_not_there_or_holds_no_text_is_named(parquet, tmp_path: Path):
    with pytest.raises(UserError, match=r"no column 'body'; its columns are title, text, url"):
        read(parquet, column="body")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "n.parquet")
    with pytest.raises(UserError, match="holds int64, not text"):
        read(tmp_path / "n.parquet")


TYPES = PARQUET | {"dictionary_of_int8": pa.dictionary(pa.int8(), pa.large_string()), "json": pa.json_()}


@pytest.mark.parametrize("kind", TYPES)
def test_parquet_text_may_be_stored_in_any_way(tmp_path: Path, kind):
    text = pa.array(["un", "deux", None, "un"])
    kept = TYPES[kind]
    text = text.cast(kept) if kind != "json" else pa.ExtensionArray.from_storage(kept, text)
    pq.write_table(pa.table({"text": text}), tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet") == ["un", "deux", "", "un"]


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "binary", "binary_view", "dictionary"])
def test_a_row_that_is_not_utf_8_costs_itself(tmp_path: Path, kind):
    """pyarrow hands out such a row without a look at it, and fails when it is asked for its text."""
    values = [b"one", b"caf\xe9", b"half a pair \xed\xa0\xbd", "café".encode(), b"\xff\xfe"]
    binary = pa.array(values, pa.large_binary() if kind == "large_string" else pa.binary())
    if kind == "dictionary":
        text = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 3, 4], pa.int32()), binary.view(pa.string()))
    elif kind.endswith("string"):
        text = binary.view(TYPES[kind])
    else:
        text = binary.cast(pa.binary_view()).view(TYPES[kind]) if "view" in kind else binary
    pq.write_table(pa.table({"text": text}), tmp_path / "t.parquet", row_group_size=3)
    (file,) = inputs(str(tmp_path / "t.parquet"))
    found = list(read_piece(Piece(file), LIMIT))
    assert [r for r in found if isinstance(r, str)] == ["one", "café"]
    lost = [r for r in found if isinstance(r, Skipped)]
    assert [(r.where.rpartition(", row group ")[2], r.records, r.lost) for r in lost] == [
        ("0, row 1", 1, 0),
        ("0, row 2", 1, 0),
        ("1, row 1", 1, 0),
    ]
    assert all(r.kind == "damaged" and "not UTF-8" in r.why for r in lost)


def test_a_part_whose_column_is_all_null_holds_empty_articles(tmp_path: Path):
    for number, kind in enumerate((pa.null(), pa.int64(), pa.float64(), pa.list_(pa.string()))):
        pq.write_table(pa.table({"text": pa.array([None, None], kind)}), tmp_path / f"{number}.parquet")
    assert read(tmp_path) == [""] * 8
    pq.write_table(pa.table({"text": pa.array([], pa.int64())}), tmp_path / "4.parquet")
    assert read(tmp_path / "4.parquet") == []


def test_a_column_that_is_there_twice_is_refused_and_others_may_be(tmp_path: Path):
    rows = pa.array(["a", "b"])
    pq.write_table(pa.table([rows, rows], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="2 of its columns are called 'text'") as caught:
        read(tmp_path / "a.parquet")
    assert caught.value.fix
    pq.write_table(pa.table([rows, rows, rows], names=["x", "text", "x"]), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet") == ["a", "b"]


def test_columns_whose_names_begin_alike_are_told_apart(tmp_path: Path):
    """Asked for `text`, pyarrow gives `text.en` as well; `doc.text` is a column or a field of one."""
    names = {"text.en": ["no", "no"], "text": ["a", "b"], "doc": [{"text": "no"}] * 2, "doc.text": ["c", "d"]}
    pq.write_table(pa.table(names), tmp_path / "a.parquet")
    path = tmp_path / "a.parquet"
    assert read(path) == ["a", "b"]
    assert read(path, column="doc.text") == ["c", "d"]
    assert read(path, column="text.en") == ["no", "no"]
    with pytest.raises(UserError, match=r"holds struct<text: string>, not text"):
        read(path, column="doc")


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_parquet_file_in_another_wrapping_says_so(tmp_path: Path, parquet, pack):
    (tmp_path / "a.parquet").write_bytes(pack(parquet.read_bytes()))
    ((kind, why),) = read(tmp_path / "a.parquet")
    assert kind == "damaged" and why.startswith("not Parquet but compressed with")


def test_a_parquet_bomb_is_skipped_by_its_row_groups_sizes(tmp_path: Path, monkeypatch):
    from pkm.prepare.input import parquet

    monkeypatch.setattr(parquet, "BOMB_BYTES", 1 << 20)
    table = pa.table({"text": ["\0" * (4 << 20)]})
    pq.write_table(table, tmp_path / "bomb.parquet", compression="zstd", use_dictionary=False)
    found = read(tmp_path / "bomb.parquet")
    assert found[0][0] == "too_large" and "that unpack to" in found[0][1]
