"""pkm/prepare/input/json_values.py: arrays and objects over several lines are read an object at a time, damaged or not."""

from __future__ import annotations

import gzip
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.prepare.input.json_values import OneALine, holds_values
from pkm.prepare.input.readers import read_piece
from pkm.prepare.input.sources import Piece
from tests.support.reading import LIMIT, inputs, read

OBJECTS = [
    {"text": f'text {i} }} ] " \\ \n, {{ [', "list": [{"a": "]"}, {"text": "no"}], "of": {"text": {}}}
    for i in range(30)
]
WRITTEN = {
    "array": json.dumps(OBJECTS),
    "indented": json.dumps(OBJECTS, indent=2),
    "not indented": json.dumps(OBJECTS, indent=0),
    "tabs and CR": json.dumps(OBJECTS, indent="\t").replace("\n", "\r\n"),
    "a line each": "[\n" + ",\n".join(map(json.dumps, OBJECTS)) + "\n]\n",
    "commas in front": "[" + "\n,".join(map(json.dumps, OBJECTS)) + "]",
    "objects over lines": "\n".join(json.dumps(value, indent=2) for value in OBJECTS),
    "objects in a row": "{\n" + "".join(map(json.dumps, OBJECTS))[1:],
    "several arrays": json.dumps(OBJECTS[:7]) + "\n" + json.dumps(OBJECTS[7:], indent=1),
    "with a mark": "\ufeff" + json.dumps(OBJECTS, indent=1),
}


@pytest.mark.parametrize("how", WRITTEN)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("target", [None, 50])
def test_objects_are_read_however_they_are_set(tmp_path, how, pack, target):
    (tmp_path / "in.json").write_bytes(pack(WRITTEN[how].encode()))
    assert read(tmp_path / "in.json", target) == [value["text"] for value in OBJECTS]


def test_lines_of_objects_are_not_looked_into():
    assert not holds_values(b'{"text": "a"}\n{"text": "b"}')
    assert not holds_values(b"") and not holds_values(b"["[:0] + b'\n\n{"a": [\n')
    assert holds_values(b"\xef\xbb\xbf \n[") and holds_values(b"\n{ \r\n")


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.dictionaries(st.text(max_size=5), st.text(max_size=9) | st.lists(st.text(max_size=3)), max_size=3)
    ),
    indent=st.sampled_from([None, 0, 1, 4]),
    size=st.integers(1, 12),
)
def test_any_array_is_its_objects_a_line_each_wherever_blocks_end(values, indent, size):
    stream = OneALine(io.BytesIO(json.dumps(values, indent=indent, ensure_ascii=False).encode()))
    output = b"".join(iter(lambda: stream.read(size), b""))
    assert [json.loads(line) for line in output.splitlines() if line.strip()] == values


DAMAGE = {
    "a quote too many": ("seven", 'sev"en'),
    "a quote too few": ('"seven', "seven"),
    "no end": ('seven}"', "seven"),
    "no brace": ('{"text": "seven', '"text": "seven'),
}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_object_costs_itself_where_objects_begin_on_lines_of_their_own(tmp_path, indent, damage):
    texts = [f"text {i}}}" if i != 7 else "seven}" for i in range(30)]
    written = [json.dumps({"text": text, "list": ["[", {"a": "{"}]}, indent=indent) for text in texts]
    whole = written[7] = written[7].replace('{\n  "text"', '{"text"')
    written[7] = whole.replace(*DAMAGE[damage])
    assert written[7] != whole
    (tmp_path / "in.json").write_text("[\n" + ",\n".join(written) + "\n]")
    found = read(tmp_path / "in.json")
    assert [r for r in found if isinstance(r, str)] == texts[:7] + texts[8:]
    assert {r[0] for r in found if isinstance(r, tuple)} == {"damaged"}


def test_an_object_that_lost_its_end_within_a_line_takes_what_follows_with_it_and_that_is_counted(tmp_path):
    content = json.dumps([{"text": f"text {i}"} for i in range(100)]).encode()
    data = content.replace(b'text 30"', b"text 30")
    (tmp_path / "in.json").write_bytes(data)
    (file,) = inputs(str(tmp_path / "in.json"))
    *texts, damage = list(read_piece(Piece(file), LIMIT))
    assert texts == [f"text {i}" for i in range(30)]
    assert damage.kind == "damaged" and damage.lost == len(data) - data.index(b'{"text": "text 30') + 2


def test_what_is_no_object_is_named(tmp_path):
    (tmp_path / "in.json").write_text('["a, b", 5, {"text": "fine"}, null, {"body": 1}]')
    (file,) = inputs(str(tmp_path / "in.json"))
    found = list(read_piece(Piece(file), LIMIT))
    assert [r if isinstance(r, str) else r.why for r in found] == [
        "no field 'text': no object",
        "no field 'text': no object",
        "fine",
        "no field 'text': no object",
        "no field 'text': its fields are body",
    ]
    assert [r.where.rpartition(", ")[2] for r in found if not isinstance(r, str)] == [
        "object 1",
        "object 2",
        "object 4",
        "object 5",
    ]


def test_an_object_over_the_limit_is_passed_over(tmp_path):
    values = [{"text": "before"}, {"text": "x" * 2000}, {"text": "after"}]
    (tmp_path / "in.json").write_text(json.dumps(values, indent=1))
    assert read(tmp_path / "in.json") == ["before", ("too_large", "larger than 0.000953674 MB"), "after"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_array_that_ends_early_gives_what_comes_before_and_one_damage(tmp_path, pack):
    data = pack(json.dumps([{"text": f"text {i} {i * i}"} for i in range(500)]).encode())
    (tmp_path / "in.json").write_bytes(data[: len(data) * 9 // 10])
    (file,) = inputs(str(tmp_path / "in.json"))
    *texts, damage = read_piece(Piece(file), LIMIT)
    assert texts == [f"text {i} {i * i}" for i in range(len(texts))] and len(texts) > 400
    assert damage.kind == "damaged" and "ends in the middle" in damage.why
