"""pkm/prepare/input/readers.py and sources.py: every record once, in order, whatever the format and wherever a file is cut."""

from __future__ import annotations

import gzip
import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.errors import UserError
from pkm.prepare.input import sources
from pkm.prepare.input.readers import read_piece
from pkm.prepare.input.records import Skipped
from pkm.prepare.input.sources import Input, Piece, units_of
from tests.support.reading import LIMIT, inputs, read

FEW = settings(max_examples=60, deadline=None)


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
        "a",
        ("too_large", "larger than 0.000953674 MB"),
    ]


def test_no_text_holds_half_a_surrogate_pair(tmp_path: Path):
    """It would end whatever reads it as UTF-8 later: identifying the language, the spool, the encoder."""
    lines = [
        r'{"text": "one \ud83d"}',
        r'{"text": "\ude00"}',
        r'{"text": "\ud83d\ude00"}',
        r'{"text": "\ud83d\ud83d\ude00"}',
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    # As some programs write it, each half for itself.
    (tmp_path / "in.txt").write_bytes(b"two\xed\xa0\xbd\xed\xb8\x80\nfine")
    found = [r for f in inputs(str(tmp_path), documents="line") for r in read_piece(Piece(f), LIMIT)]
    assert [r.where.rpartition(":")[2] if isinstance(r, Skipped) else r for r in found] == [
        "1",
        "2",
        "\U0001f600",
        "4",
        "1",
        "fine",
    ]
    assert "half a surrogate pair (U+D83D)" in found[0].why and "half a surrogate pair (U+DE00)" in found[1].why


def test_files_put_one_after_the_other_may_have_marks_within(tmp_path: Path):
    mark = "\ufeff"
    (tmp_path / "a.jsonl").write_text(f'{mark}{{"text": "one"}}\n{mark}{{"text": "{mark}two"}}\n{mark}\n')
    assert read(tmp_path / "a.jsonl") == ["one", "two"]
    (tmp_path / "a.txt").write_text(f"{mark}one\n\n{mark}two\n")
    assert read(tmp_path / "a.txt", documents="blank") == ["one", "two"]


def test_a_number_of_any_length_beside_the_text_does_no_harm(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(f'{{"id": {"9" * 500}, "text": "one"}}\n{{"text": {"7" * 500}}}\n')
    limited = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        (tmp_path / "b.jsonl").write_text(f'{{"id": {"9" * 800}, "text": "one"}}\n')
        assert read(tmp_path) == ["one", ("damaged", "the field 'text' holds no text"), "one"]
    finally:
        sys.set_int_max_str_digits(limited)


def test_text_in_utf_16_without_a_mark_is_not_taken_for_utf_8(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes("Plain words".encode("utf-16-le"))
    assert read(tmp_path) == [("damaged", "not text: over a quarter of its bytes are NUL (UTF-16 without a mark?)")]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("target", [None, 100])
def test_text_in_utf_16_with_its_mark_is_read(tmp_path: Path, encoding, pack, target):
    texts = [f"Größe {i} \U0001f600 über" for i in range(40)]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\r\n" for text in texts)
    mark = "\ufeff" if encoding.endswith("be") else ""
    (tmp_path / "a.jsonl").write_bytes(pack((mark + lines).encode(encoding)))
    (tmp_path / "b.txt").write_bytes(pack((mark + "\n\n".join(texts)).encode(encoding)))
    assert read(tmp_path / "a.jsonl", target) == texts
    assert read(tmp_path / "b.txt", target, documents="blank") == texts
    assert read(tmp_path / "b.txt", target, documents="line") == texts


def test_a_file_of_no_text_but_a_mark_holds_nothing(tmp_path: Path):
    for number, encoding in enumerate(("utf-8-sig", "utf-16", "utf-32")):
        (tmp_path / f"{number}.jsonl").write_bytes("".encode(encoding))
    assert read(tmp_path) == []


def test_two_damaged_bytes_in_front_make_no_utf_16_of_a_file(tmp_path: Path):
    for mark in (b"\xff\xfe", b"\xfe\xff"):
        (tmp_path / "a.txt").write_bytes(mark + b"is damaged\nthis \xff as well\n" + b"fine\n" * 3)
        found = read(tmp_path / "a.txt", documents="line")
        assert [r for r in found if isinstance(r, str)] == ["fine"] * 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 and so on", r"a ZIP archive: name what is in it: path: zip://\*.jsonl::.*in.jsonl"),
        (b"a" * 257 + b"ustar\0", "a tar archive"),
        (gzip.compress(gzip.compress(b"text")), r"compressed twice \(gz once more inside\)"),
        (b"\x04\x22\x4d\x18 and so on", "compressed with LZ4: unpack it"),
        (gzip.compress(b"WARC/1.0\r\n"), "a web archive: give `format: warc`"),
        (b"PAR1\x15\x04", "a Parquet file: give `format: parquet`"),
    ],
    ids=["ZIP", "tar", "gz in gz", "LZ4", "web archive", "Parquet"],  # not the bytes: gzip writes the time into them
)
@pytest.mark.parametrize("kind", [{}, {"format": "text"}, {"format": "text", "documents": "line"}])
def test_a_file_of_another_kind_is_named_and_lost_whole(tmp_path: Path, content, message, kind):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    (found,) = [r for f in inputs(str(path), **kind) for r in read_piece(Piece(f), LIMIT)]
    assert found.kind == "damaged" and found.lost == len(content)
    assert re.match(message, found.why)


def test_what_the_message_about_an_archive_says_to_do_works(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("a.zip", "w") as archive:
        archive.writestr("in/a.txt", "zipped")
    with tarfile.open("a.tar.gz", "w:gz") as archive:
        Path("b.txt").write_text("in a tar")
        archive.add("b.txt", "in/b.txt")
    assert read("zip://**/*.txt::a.zip") == ["zipped"]
    assert read("tar://**/*.txt::a.tar.gz") == ["in a tar"]


def test_a_truncated_file_gives_what_comes_before_and_one_damage(tmp_path: Path):
    lines = b"".join(json.dumps({"text": f"{i} {i * i}"}).encode() + b"\n" for i in range(30_000))
    packed = zstandard.compress(lines)
    (tmp_path / "in.jsonl.zst").write_bytes(packed[: len(packed) // 2])
    found = read(tmp_path / "in.jsonl.zst")
    assert found[0] == "0 0"
    assert found[-1] == ("damaged", "the file ends in the middle of its zst data")
    assert sum(isinstance(record, tuple) for record in found) <= 2


def test_a_document_in_which_a_file_breaks_off_is_none(tmp_path: Path):
    texts = [f"first line {i * i}\nsecond line {i * i * i}" for i in range(3000)]
    packed = gzip.compress("\n\n".join(texts).encode())
    (tmp_path / "in.txt.gz").write_bytes(packed[: len(packed) // 2])
    *documents, clip = read(tmp_path / "in.txt.gz", documents="blank")
    assert documents == texts[: len(documents)] and len(documents) > 1000
    assert clip == ("damaged", "the file ends in the middle of its gz data")


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
