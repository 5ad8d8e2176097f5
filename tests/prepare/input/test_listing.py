"""pkm/prepare/input/listing.py and sources.py: which files a path means, each once, and what is said of the others."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.errors import UserError
from pkm.prepare.input.listing import LeftOut
from pkm.prepare.input.sources import list_inputs
from pkm.prepare.settings import PrepareConfig


def listed(*paths, **source) -> tuple[list[str], dict[str, int]]:
    """(names read, how many were left out by reason) of sources in the current directory."""
    left_out = LeftOut()
    config = PrepareConfig.model_validate({"name": "x", "sources": [{"path": path, **source} for path in paths]})
    return [file.url for file in list_inputs(config, left_out)], left_out.counts()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def made(*names: str) -> None:
    for name in names:
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w") as file:
            file.write(json.dumps({"text": name.encode("utf-8", "replace").decode()}) + "\n")


class TestEndings:
    @pytest.mark.parametrize(
        "name",
        ["a.txt.bak", "notes.txt.pdf", "README.txt.md", "b.jsonl.md5", "x.jsonl.gz.part", "x.parquet.crc", "a.txt~", "a.txt.1",
         "w.warc.gz.open", "my.json.notes", "a.txt.gz.gz", "txt", "gz", "a.jsonl.tmp", "a.csv", "a.tar.gz"],
    )  # fmt: skip
    def test_what_stands_in_the_middle_of_a_name_is_no_ending(self, name):
        made("d/a.txt", f"d/{name}")
        names, left_out = listed("d")
        assert names == ["d/a.txt"]
        assert sum(left_out.values()) == 1

    @pytest.mark.parametrize(
        ("name", "format"),
        [("a.TXT", "text"), ("a.jsonl.gz", "jsonl"), ("b.v2.json.zst", "jsonl"), ("c.snappy.parquet", "parquet"),
         ("c.gz.parquet", "parquet"), ("CC-MAIN-1.warc.wet.gz", "warc"), ("a.text.xz", "text"), ("a.md.txt", "text")],
    )  # fmt: skip
    def test_the_last_ending_tells_the_kind_and_may_be_followed_by_a_compressions(self, name, format):
        made(f"d/{name}")
        config = PrepareConfig.model_validate({"name": "x", "sources": [{"path": "d"}]})
        assert [file.format for file in list_inputs(config)] == [format]

    def test_what_is_left_out_is_counted_by_ending(self):
        made(
            "d/a.txt",
            "d/a.txt.bak",
            "d/b.txt.bak",
            "d/e/c.pdf",
            "d/LICENSE",
            "d/x.tar.gz",
            "d/_SUCCESS",
            "d/.git/x.txt",
        )
        left_out = LeftOut()
        list_inputs(PrepareConfig.model_validate({"name": "x", "sources": [{"path": "d"}]}), left_out)
        assert left_out.counts() == {
            ".bak": 2,
            "hidden (names that begin with . or _)": 2,
            "without an ending": 1,
            ".pdf": 1,
            ".tar.gz": 1,
        }
        assert left_out.line().startswith("left out: 2 .bak, ") and "d/a.txt.bak" in left_out.line()

    def test_a_folder_of_other_kinds_only_says_what_is_in_it(self):
        made("d/a.csv", "d/b.csv")
        with pytest.raises(UserError, match=r"'d' holds no files of a known kind \(left out: 2 .csv"):
            listed("d")

    def test_a_set_format_reads_every_file(self):
        made("d/a.txt", "d/b", "d/c.txt.bak")
        assert listed("d", format="text") == (["d/a.txt", "d/b", "d/c.txt.bak"], {})


class TestLinks:
    @pytest.fixture(autouse=True)
    def linked(self):
        made("d/a.txt", "far/2019/b.txt", "far/2019/deep/c.txt", "far/2020.txt", "cache/blobs/1f3d", "d/e/f.txt")
        os.symlink("../far/2019", "d/2019")
        os.symlink("../far/2020.txt", "d/2020.txt")
        os.symlink("../cache/blobs/1f3d", "d/g.txt")

    ALL = ("d/2019/b.txt", "d/2019/deep/c.txt", "d/2020.txt", "d/a.txt", "d/e/f.txt", "d/g.txt")

    @pytest.mark.parametrize("path", ["d", "d/", "d/**", "d/*", "?", "d/**/*.txt", "**/*", "*/**/*.t[x]t"])
    def test_files_and_folders_behind_links_are_read(self, path):
        names, _ = listed(path)
        if path in ("**/*", "*/**/*.t[x]t"):
            assert {os.path.realpath(name) for name in names} >= {os.path.realpath(name) for name in self.ALL}
        else:
            assert tuple(names) == self.ALL

    @pytest.mark.parametrize(
        ("path", "names"),
        [("d/*.txt", ["d/2020.txt", "d/a.txt", "d/g.txt"]), ("d/2019/*.txt", ["d/2019/b.txt"]), ("d/20*/b.txt", ["d/2019/b.txt"]),
         ("d/2019", ["d/2019/b.txt", "d/2019/deep/c.txt"]), ("d/**/c.txt", ["d/2019/deep/c.txt"]), ("d/g.txt", ["d/g.txt"])],
    )  # fmt: skip
    def test_a_glob_matches_names_as_they_are_seen(self, path, names):
        assert listed(path)[0] == names

    def test_a_folder_that_is_itself_a_link_is_read(self):
        os.symlink("d", "current")
        assert len(listed("current")[0]) == len(self.ALL)
        assert len(listed("curr*")[0]) == len(self.ALL)

    @pytest.mark.parametrize("target", [".", "..", "../d", "../..", "/"])
    @pytest.mark.parametrize("path", ["d", "d/**/*.txt"])
    def test_links_that_lead_back_up_end_nothing_and_are_counted(self, target, path):
        os.symlink(target, "d/loop")
        os.symlink("../.." if target == "/" else f"../{target}", "d/e/loop")
        names, left_out = listed(path)
        assert tuple(names) == self.ALL
        assert left_out["links to a folder around them"] >= 1

    def test_folders_that_link_to_each_other_are_read_once(self):
        for one in range(12):
            made(f"ring/{one}/x.txt")
            for other in range(12):
                os.symlink(f"../{other}", f"ring/{one}/to{other}")
        assert listed("ring")[0] == sorted(f"ring/{one}/x.txt" for one in range(12))
        assert listed("ring/**/x.txt")[0] == sorted(f"ring/{one}/x.txt" for one in range(12))

    def test_a_file_with_several_names_is_read_once_by_its_own(self):
        os.symlink("a.txt", "d/0.txt")
        os.symlink("../a.txt", "d/e/z.txt")
        names, left_out = listed("d")
        assert tuple(names) == self.ALL
        assert left_out == {"further names of files that are read": 2}

    def test_a_link_to_nothing_is_an_error_where_a_file_was_meant_and_counted_elsewhere(self):
        os.symlink("gone", "d/lock")
        os.symlink("itself", "d/itself")
        assert listed("d") == (list(self.ALL), {"links to nothing": 2})
        os.symlink("gone.txt", "d/h.txt")
        for path in ("d", "d/*", "d/**/h.txt"):
            with pytest.raises(UserError, match=r"d/h.txt: it is a link to nothing"):
                listed(path)

    def test_pipes_are_not_waited_for(self):
        os.mkfifo("d/pipe.txt")
        assert listed("d") == (list(self.ALL), {"neither file nor folder": 1})
        with pytest.raises(UserError, match="neither a file nor a folder"):
            listed("d/pipe.txt")


@settings(max_examples=60, deadline=None)
@given(
    parents=st.lists(st.integers(0, 5), min_size=5, max_size=5),
    links=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8, unique=True),
    files=st.lists(st.integers(0, 5), max_size=6),
    glob=st.booleans(),
)
def test_every_file_in_a_folder_is_read_exactly_once_whatever_links_there_are(
    tmp_path_factory, parents, links, files, glob
):
    root = tmp_path_factory.mktemp("tree")
    folders = [root / "d"]
    for number, parent in enumerate(parents):
        folders.append(folders[min(parent, number)] / str(number))
    for folder in folders:
        folder.mkdir()
    for number, folder in enumerate(files):
        (folders[folder] / f"{number}.txt").write_text("x")
    for one, other in links:
        os.symlink(folders[other], folders[one] / f"to{other}")
    expected = sorted(str(path) for path in (root / "d").rglob("*.txt"))
    if expected:
        assert listed(f"{root}/d/**/*.txt" if glob else f"{root}/d")[0] == expected


class TestNamesAreBytes:
    @pytest.mark.parametrize("path", ["d", "d/*", "d/**/*.jsonl", "*"])
    def test_a_name_that_is_not_utf8_is_a_name(self, path):
        made(*(os.fsdecode(name) for name in (b"d/caf\xe9.jsonl", b"d/f\xff/x.jsonl", b"d/plain.jsonl")))
        names, _ = listed(path)
        assert sorted(map(os.fsencode, names)) == [b"d/caf\xe9.jsonl", b"d/f\xff/x.jsonl", b"d/plain.jsonl"]

    def test_brackets_in_a_name_are_taken_as_they_are_where_there_is_such_a_name(self):
        made("a[1]/x.txt", "a[1]/[b].txt", "a1/y.txt")
        assert listed("a[1]/*.txt")[0] == ["a[1]/[b].txt", "a[1]/x.txt"]
        assert listed("a[1]")[0] == ["a[1]/[b].txt", "a[1]/x.txt"]
        assert listed("a[12]/*.txt")[0] == ["a1/y.txt"]


class TestSources:
    def test_a_file_read_in_two_ways_is_two_inputs(self):
        made("d/a.jsonl")
        sources = [{"path": "d/a.jsonl", "column": "title"}, {"path": "d", "column": "text"}]
        left_out = LeftOut()
        found = list_inputs(PrepareConfig.model_validate({"name": "x", "sources": sources}), left_out)
        assert [(file.url, file.column) for file in found] == [("d/a.jsonl", "title"), ("d/a.jsonl", "text")]
        assert not left_out.reasons

    def test_a_file_named_twice_for_the_same_is_read_once_and_counted(self):
        made("d/a.jsonl", "d/b.jsonl")
        assert listed("d/b.jsonl", "d") == (["d/b.jsonl", "d/a.jsonl"], {"further names of files that are read": 1})
