"""pkm/prepare/pipeline.py: the result depends on the articles and the settings, and on nothing else."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import assume, given
from hypothesis import strategies as st

from pkm.corpus.store import open_corpus
from pkm.errors import UserError
from pkm.prepare import pipeline, tasks, work_directory
from pkm.text.vocab import EOS_ID
from tests.prepare.conftest import content, made_articles, write_jsonl


def texts(corpus, name: str) -> list[str]:
    """Documents of a split, decoded, without white space: what tokenizing and detokenizing may move about."""
    split, encoder = corpus.split(name), corpus.encoder()
    return ["".join(encoder.decode(split.document(i)).split()) for i in range(split.documents)]


def lines(corpus, split, i: int) -> list[str]:
    return corpus.encoder().decode(split.document(i)).split("\n")


def bare(articles: list[str]) -> list[str]:
    return ["".join(article.split()) for article in articles]


def test_every_article_is_in_one_split_and_training_keeps_their_order(prepared):
    articles = made_articles(60)
    corpus = open_corpus(prepared(str(write_jsonl(Path("in.jsonl"), articles))))
    train, valid, test = (texts(corpus, name) for name in ("train", "valid", "test"))
    assert (len(train), len(valid), len(test)) == (53, 4, 3)
    assert sorted(train + valid + test) == sorted(bare(articles))
    assert train == [text for text in bare(articles) if text not in valid + test]


def test_counts_in_the_manifest_are_those_of_the_ids(prepared):
    articles = made_articles(40)
    corpus = open_corpus(prepared(str(write_jsonl(Path("in.jsonl"), articles)), subwords={"codes": 30}))
    splits = [corpus.split(name) for name in ("train", "valid", "test")]
    for split in splits:
        ids = split.read(0, split.tokens)
        assert len(ids) == split.tokens
        assert corpus.vocab.word_ends[ids].sum() == split.words
        assert (ids == EOS_ID).sum() == sum(
            line != "" for i in range(split.documents) for line in lines(corpus, split, i)
        )
    assert sum(split.bytes for split in splits) == sum(len(text.encode()) for text in articles)
    assert sum(split.words for split in splits) > sum(len(text.split()) for text in articles)


def test_output_is_identical_for_any_number_of_workers(prepared, small_pieces):
    small_pieces(2000)
    write_jsonl(Path("in.jsonl"), made_articles(60))
    alone, three = prepared("in.jsonl", "alone"), prepared("in.jsonl", "three", workers=3)
    assert len(list(alone.glob("train-*.bin"))) > 3
    one, other = content(alone), content(three)
    one["manifest.json"] = one["manifest.json"].replace(b'"alone"', b'"three"')
    assert one == other


def test_the_same_articles_give_the_same_ids_however_they_are_stored_and_cut(prepared, small_pieces):
    articles = made_articles(60)
    plain = write_jsonl(Path("in.jsonl"), articles).read_bytes()
    Path("in.jsonl.gz").write_bytes(gzip.compress(plain))
    Path("in.jsonl.xz").write_bytes(lzma.compress(plain))
    Path("in.jsonl.zst").write_bytes(zstandard.compress(plain[:5000]) + zstandard.compress(plain[5000:]))
    Path("folder").mkdir()
    for number, text in enumerate(articles):
        (Path("folder") / f"{number:03d}.txt").write_text(text)
    Path("blank.txt").write_text("\n\n \n".join(articles))
    Path("blank.txt.gz").write_bytes(gzip.compress("\n\n".join(articles).replace("\n", "\r\n").encode()))
    results = []
    for size, path, documents in (
        (10**6, "in.jsonl", "file"),
        (3000, "in.jsonl", "file"),
        (1000, "in.jsonl.gz", "file"),
        (700, "in.jsonl.xz", "file"),
        (1500, "in.jsonl.zst", "file"),
        (2500, "folder", "file"),
        (2500, "blank.txt", "blank"),
        (2500, "blank.txt.gz", "blank"),
    ):
        small_pieces(size)
        corpus = open_corpus(prepared(path, f"out{len(results)}", source={"documents": documents}))
        results.append({name: corpus.split(name).read(0, 10**9) for name in ("train", "valid", "test")})
        if size < 10**6:
            assert len(corpus.manifest["splits"]["train"]["shards"]) > 1
    for result in results[1:]:
        for name, ids in result.items():
            assert np.array_equal(ids, results[0][name])


def test_held_out_articles_have_the_smallest_hashes_whatever_the_order_of_the_input(prepared):
    articles = made_articles(60)
    forward = open_corpus(prepared(str(write_jsonl(Path("a.jsonl"), articles)), "a"))
    backward = open_corpus(prepared(str(write_jsonl(Path("b.jsonl"), articles[::-1])), "b"))
    for name in ("valid", "test"):
        assert texts(forward, name) == texts(backward, name)


@pytest.mark.parametrize("duplicates", ["drop", "keep"])
def test_no_copy_of_a_held_out_article_is_in_training(prepared, duplicates):
    articles = made_articles(40)
    write_jsonl(Path("in.jsonl"), articles * 3)
    corpus = open_corpus(prepared("in.jsonl", filters={"language": None, "duplicates": duplicates}))
    train, held = texts(corpus, "train"), texts(corpus, "valid") + texts(corpus, "test")
    assert len(held) == len(set(held)) == 7
    assert not set(train) & set(held)
    assert len(train) == (33 if duplicates == "drop" else 99)
    assert corpus.manifest["dropped"]["duplicate"] == (80 if duplicates == "drop" else 14)


ODD_SPACES = {
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "CR": lambda text: text.replace("\n", "\r"),
    "trailing blanks": lambda text: text.replace("\n", " \t\n") + "  ",
    "final newlines": lambda text: text + "\n\n",
    "blank lines": lambda text: "\n" + text.replace("\n", "\n \n"),
    "no-break spaces": lambda text: text.replace(" ", "\u00a0"),
    "other spaces": lambda text: text.replace(" ", "\u2003\t"),
    "deleted controls": lambda text: "\0" + text.replace(" ", " \x1f"),
}


@pytest.mark.parametrize("change", ODD_SPACES.values(), ids=ODD_SPACES)
@pytest.mark.parametrize("first", ["plain", "changed"])
def test_articles_that_differ_in_white_space_only_are_copies_in_every_split(prepared, change, first):
    articles = made_articles(40)
    changed = [change(text) for text in articles]
    write_jsonl(Path("in.jsonl"), articles + changed if first == "plain" else changed + articles)
    corpus = open_corpus(prepared("in.jsonl"))
    assert [corpus.split(name).documents for name in ("train", "valid", "test")] == [33, 4, 3]
    assert corpus.manifest["dropped"]["duplicate"] == 40
    ids = [tuple(s.document(i)) for s in (corpus.train, corpus.valid, corpus.test) for i in range(s.documents)]
    assert len(set(ids)) == 40


def test_what_the_set_normalization_makes_equal_are_copies_and_only_then(prepared):
    articles = [f'The minister said "no" in town {number}.' for number in range(40)]
    curly = [text.replace(' "', " \u201c").replace('" ', "\u201d ") for text in articles]
    write_jsonl(Path("in.jsonl"), articles + curly)
    plain, xlm = (
        open_corpus(prepared("in.jsonl", name, tokenizer={"normalize": name if name == "xlm" else None}))
        for name in ("plain", "xlm")
    )
    assert "duplicate" not in plain.manifest["dropped"]
    assert xlm.manifest["dropped"]["duplicate"] == 40


def test_articles_that_a_model_reads_differently_are_not_copies(prepared):
    articles = made_articles(40)
    joined = [text.replace("\n", " ") for text in articles]
    write_jsonl(Path("in.jsonl"), articles + joined)
    corpus = open_corpus(prepared("in.jsonl"))
    assert corpus.train.documents == len(set(articles) | set(joined)) - 7


def test_lines_of_every_kind_of_line_end_are_the_same_ids_and_bytes(prepared):
    articles = made_articles(40)
    found = []
    for name, end in (("lf", "\n"), ("crlf", "\r\n"), ("cr", "\r")):
        write_jsonl(Path(f"{name}.jsonl"), [text.replace("\n", end) for text in articles])
        found.append(open_corpus(prepared(f"{name}.jsonl", name)))
    assert len({corpus.fingerprint for corpus in found}) == 1
    assert len({corpus.train.bytes for corpus in found}) == 1


def test_an_unfinished_preparation_of_another_version_is_not_gone_on_with(prepared, monkeypatch):
    articles = made_articles(40)
    write_jsonl(Path("in.jsonl"), articles + [ODD_SPACES["trailing blanks"](text) for text in articles])
    with monkeypatch.context() as old:
        old.setattr(work_directory, "VERSION", work_directory.VERSION - 1)
        old.setattr(tasks, "_identity", lambda text, tokenizer: text.encode())
        with pytest.raises(UserError, match="too few"):
            prepared("in.jsonl", held_out={"valid": 90, "test": 90})
    assert Path("prepared/out.preparing/read/00000.json").exists()
    assert open_corpus(prepared("in.jsonl")).manifest["dropped"] == {"duplicate": 40}


@pytest.mark.parametrize("packed", [False, True])
def test_two_sources_on_one_file_read_two_columns_of_it(prepared, small_pieces, packed):
    small_pieces(1000)
    articles = made_articles(60)
    lines = "".join(json.dumps({"title": f"{text} title", "text": text}) + "\n" for text in articles).encode()
    Path("in.jsonl").write_bytes(gzip.compress(lines) if packed else lines)
    out = prepared("in.jsonl", sources=[{"path": "in.jsonl", "column": column} for column in ("title", "text")])
    corpus = open_corpus(out)
    assert corpus.manifest["records"] == 120
    assert sum(corpus.split(name).documents for name in ("train", "valid", "test")) == 120


def test_names_that_are_not_utf8_are_read_named_and_gone_on_with(prepared, small_pieces):
    small_pieces(1500)
    folder = os.fsdecode(b"f\xff")
    os.mkdir(folder)
    names = [os.path.join(folder, os.fsdecode(name)) for name in (b"caf\xe9.jsonl", b"caf\xe8.jsonl.gz")]
    lines = write_jsonl(Path(names[0]), made_articles(60)).read_bytes() + b'{"text": 5}\n'
    Path(names[0]).write_bytes(lines)
    Path(names[1]).write_bytes(
        gzip.compress(write_jsonl(Path("x.jsonl"), made_articles(60, seed=1)).read_bytes() + b"}\n")
    )
    Path("x.jsonl").unlink()
    with pytest.raises(UserError, match="too few"):
        prepared("*", held_out={"valid": 90, "test": 90}, limits={"damaged": 0.1})
    spool = Path("prepared/out.preparing/read/00000.docs")
    before = spool.stat().st_ino
    with pytest.raises(UserError, match=r"f\\xff/caf\\xe9.jsonl, byte \d+: the field"):
        prepared("f*", limits={"damaged": 0.0})
    assert spool.stat().st_ino == before
    corpus = open_corpus(prepared("f*", limits={"damaged": 0.1}, workers=2))
    assert corpus.manifest["records"] == 122
    assert sorted(where.rpartition("/")[2].partition(":")[0][:9] for _, where, _ in corpus.manifest["named"]) == [
        "caf\\xe8.j",
        "caf\\xe9.j",
    ]
    assert json.dumps(corpus.manifest, ensure_ascii=False).encode()


def test_the_manifest_counts_files_that_were_passed_over(prepared):
    os.mkdir("d")
    write_jsonl(Path("d/a.jsonl"), made_articles(40))
    for name in ("a.jsonl.bak", "b.jsonl.md5", "README.txt.md"):
        Path("d", name).write_text("not an article\n")
    os.symlink("a.jsonl", "d/b.jsonl")
    corpus = open_corpus(prepared("d"))
    assert corpus.manifest["records"] == 40
    assert corpus.manifest["left_out"] == {".bak": 1, ".md": 1, ".md5": 1, "further names of files that are read": 1}


def test_filters_drop_and_the_manifest_says_why(prepared):
    english = made_articles(30)
    others = ["", "   \n ", "short one", "word " * 300]
    german = ["Der Minister sagte am Montag, die Verhandlungen mit der Bank seien noch nicht abgeschlossen. " * 3]
    spoken = [f"The minister said on Monday that talks with the bank had not ended, article {i}." for i in range(30)]
    write_jsonl(Path("in.jsonl"), spoken + others + german)
    filters = {"language": "en", "min_words": 3, "max_words": 250}
    corpus = open_corpus(prepared("in.jsonl", filters=filters))
    assert corpus.manifest["dropped"] == {"empty": 2, "language": 1, "too_long": 1, "too_short": 1}
    assert corpus.manifest["records"] == 35
    assert len(english) == 30


def test_damage_is_counted_named_and_skipped_up_to_the_set_share(prepared):
    lines = write_jsonl(Path("in.jsonl"), made_articles(98)).read_bytes().splitlines(keepends=True)
    lines.insert(10, b'{"text": "cut off\n')
    lines.insert(20, b'{"text": "\\ud83d cut emoji"}\n')
    Path("in.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=r"2 of 100 records \(2.00%\)") as caught:
        prepared("in.jsonl", limits={"damaged": 0.01})
    assert "in.jsonl:11: not JSON" in str(caught.value)
    assert "in.jsonl:21: half a surrogate pair" in str(caught.value)
    assert "limits.damaged=0.05" in str(caught.value)
    assert not Path("prepared/out").exists()
    corpus = open_corpus(prepared("in.jsonl", limits={"damaged": 0.02}))
    assert corpus.manifest["dropped"] == {"damaged": 2}
    assert [where for _, where, _ in corpus.manifest["named"]] == ["in.jsonl:11", "in.jsonl:21"]


def test_a_file_that_ends_early_counts_by_its_bytes(prepared):
    whole = gzip.compress(write_jsonl(Path("plain.jsonl"), made_articles(300)).read_bytes())
    Path("plain.jsonl").unlink()
    write_jsonl(Path("a.jsonl"), made_articles(300, seed=1))
    Path("b.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    corpus = open_corpus(prepared("*.jsonl*"))
    assert corpus.manifest["dropped"]["damaged"] == 1
    Path("b.jsonl.gz").write_bytes(b"\x1f\x8b" + bytes(20000))
    with pytest.raises(UserError, match="of the bytes") as caught:
        prepared("*.jsonl*", "other")
    assert "b.jsonl.gz" in str(caught.value)


@pytest.mark.parametrize("size", [10**6, 2000])
def test_a_document_in_which_a_packed_file_breaks_off_is_none(prepared, small_pieces, size):
    """However large the file is: a large one is unpacked into chunks first."""
    small_pieces(size)
    articles = made_articles(200)
    packed = gzip.compress("\n\n".join(articles).encode())
    Path("in.txt.gz").write_bytes(packed[: len(packed) // 2])
    corpus = open_corpus(
        prepared("in.txt.gz", source={"documents": "blank"}, limits={"damaged": 1}, held_out={"valid": 0, "test": 0})
    )
    text = zlib.decompressobj(31).decompress(packed[: len(packed) // 2])
    whole = text.split(b"\n\n")[:-1]
    assert 50 < len(whole) == corpus.manifest["splits"]["train"]["documents"]
    assert corpus.manifest["splits"]["train"]["bytes"] == sum(map(len, whole))
    assert corpus.manifest["dropped"]["damaged"] == 1


def test_a_compressed_bomb_is_skipped_before_it_is_unpacked_whole(prepared, small_pieces):
    import resource

    small_pieces(20000)
    write_jsonl(Path("a.jsonl"), made_articles(40))
    bomb = zstandard.ZstdCompressor(level=1).compressobj()
    packed = [bomb.compress(b'{"text": "')] + [bomb.compress(bytes(1 << 20)) for _ in range(1024)]
    Path("bomb.jsonl.zst").write_bytes(
        b"".join([*packed, bomb.compress(b'"}\n{"text": "fine after all"}\n'), bomb.flush()])
    )
    assert Path("bomb.jsonl.zst").stat().st_size < 200_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    corpus = open_corpus(prepared("*.jsonl*"))
    assert corpus.manifest["dropped"] == {"too_large": 1}
    assert "finearticle" not in texts(corpus, "train")
    assert any("finefterall" in t or "fineafterall" in t for n in ("train", "valid", "test") for t in texts(corpus, n))
    # Kilobytes: far less than the gigabyte it unpacks to.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


def test_a_second_call_does_no_work_and_refuses_other_settings_or_files(prepared):
    write_jsonl(Path("in.jsonl"), made_articles(40))
    out = prepared("in.jsonl")
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    prepared("in.jsonl")
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    with pytest.raises(UserError, match=r"subwords.codes was 200, is now 100"):
        prepared("in.jsonl", subwords={"codes": 100})
    write_jsonl(Path("in.jsonl"), made_articles(41))
    with pytest.raises(UserError, match="have changed since"):
        prepared("in.jsonl")
    Path("in.jsonl").unlink()
    prepared("in.jsonl")


def test_an_unfinished_preparation_goes_on_and_redoes_only_what_changed_settings_touch(prepared):
    write_jsonl(Path("in.jsonl"), made_articles(40))
    with pytest.raises(UserError, match="too few to hold out") as caught:
        prepared("in.jsonl", held_out={"valid": 30, "test": 30})
    assert "held_out.valid=2" in str(caught.value)
    work = Path("prepared/out.preparing")
    spool = work / "read" / "00000.docs"
    before = spool.stat().st_mtime_ns
    with pytest.raises(UserError, match=r"absent: .*No such file"):
        prepared("in.jsonl", subwords={"codes_file": "absent", "vocab_file": "absent"})
    assert spool.stat().st_mtime_ns == before
    out = prepared("in.jsonl")
    assert not work.exists()
    assert content(out).keys() >= {"manifest.json", "codes", "vocab", "train-00000.bin", "train-00000.idx"}


def test_given_codes_and_vocabulary_are_used_as_they_are(prepared):
    write_jsonl(Path("in.jsonl"), made_articles(40))
    first = prepared("in.jsonl")
    shutil.copytree(first, "given")
    second = prepared("in.jsonl", "two", subwords={"codes_file": "given/codes", "vocab_file": "given/vocab"})
    assert (first / "train-00000.bin").read_bytes() == (second / "train-00000.bin").read_bytes()
    assert (second / "codes").read_bytes() == (first / "codes").read_bytes()


def test_specials_are_a_setting_and_move_the_ids_of_subwords(prepared):
    write_jsonl(Path("in.jsonl"), made_articles(40))
    ten, two = (
        open_corpus(prepared("in.jsonl", name, subwords={"codes": 50, **extra}))
        for name, extra in (("ten", {}), ("two", {"specials": ["<news>", "<date>"]}))
    )
    assert two.vocab.pieces[4:6] == ["<news>", "<date>"]
    assert two.vocab.size == ten.vocab.size - 8
    ids = ten.train.read(0, 100)
    assert np.array_equal(two.train.read(0, 100), np.where(ids >= 14, ids - 8, ids))
    assert two.fingerprint != ten.fingerprint
    with pytest.raises(UserError, match="<s>"):
        prepared("in.jsonl", "odd", subwords={"codes": 50, "specials": ["<s>"]})


@pytest.mark.parametrize("codes", [1, 200])
def test_a_min_count_above_all_counts_is_named_with_the_highest_and_nothing_is_half_written(prepared, codes):
    write_jsonl(Path("in.jsonl"), made_articles(40))
    with pytest.raises(UserError, match="no subword is seen 1000000 times") as caught:
        prepared("in.jsonl", subwords={"codes": codes, "min_count": 1_000_000})
    assert caught.value.where == "subwords.min_count"
    most = int(re.search(r"is seen (\d+) times: ask", str(caught.value))[1])
    assert not list(Path("prepared/out.preparing/learn").iterdir())
    assert open_corpus(prepared("in.jsonl", subwords={"codes": codes, "min_count": most})).vocab.size >= 15


@given(articles=st.integers(1, 400), valid=st.integers(0, 500), test=st.integers(0, 500))
def test_the_advice_on_held_out_articles_can_be_followed(articles, valid, test):
    assume(articles <= valid + test)
    fewer_valid, fewer_test = pipeline._fewer_held_out(articles, valid, test)
    assert 0 <= fewer_valid <= valid and 0 <= fewer_test <= test
    assert fewer_valid + fewer_test < articles
    if articles > 2:
        assert (fewer_valid > 0, fewer_test > 0) == (valid > 0, test > 0)


@pytest.mark.parametrize("articles", [1, 2, 3, 25])
def test_following_the_advice_on_held_out_articles_gives_a_corpus(prepared, articles):
    write_jsonl(Path("in.jsonl"), made_articles(articles))
    with pytest.raises(UserError, match="too few to hold out") as caught:
        prepared("in.jsonl", held_out={"valid": articles, "test": articles})
    valid, test = map(int, re.search(r"held_out.valid=(\d+) held_out.test=(\d+)", caught.value.fix).groups())
    assert open_corpus(prepared("in.jsonl", held_out={"valid": valid, "test": test})).train.documents >= 1


def test_given_codes_that_do_not_load_are_named_before_anything_is_read(prepared):
    write_jsonl(Path("in.jsonl"), made_articles(40))
    Path("codes").write_text("a b 3\n")
    for lines_of_vocab, named in (
        ("a 5\n<special0> 3\n", "vocab:2: the piece '<special0>' is the name"),
        ("", "is empty"),
    ):
        Path("vocab").write_text(lines_of_vocab)
        with pytest.raises(UserError, match=named):
            prepared("in.jsonl", subwords={"codes_file": "codes", "vocab_file": "vocab"})
        assert not Path("prepared").exists()


def test_xlm_normalization_and_escaping_are_recorded_and_applied(prepared):
    write_jsonl(Path("in.jsonl"), [f"{text} “x & y”" for text in made_articles(40)])
    corpus = open_corpus(prepared("in.jsonl", tokenizer={"escape": True, "normalize": "xlm"}))
    assert corpus.manifest["tokenizer"] == {"escape": True, "normalize": "xlm", "backend": "pkm"}
    pieces = set(corpus.vocab.pieces)
    assert {"&quot;", "&amp;"} <= {p.replace("@@", "") for p in pieces} and not any("“" in p for p in pieces)


def test_an_input_without_articles_says_what_became_of_it(prepared):
    write_jsonl(Path("in.jsonl"), ["", " "])
    with pytest.raises(UserError, match="there is no article in the input") as caught:
        prepared("in.jsonl")
    assert "2 empty" in str(caught.value)
    Path("empty.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match="there is no article in the input"):
        prepared("empty.jsonl")


def test_a_wrong_column_is_named_with_those_there_are(prepared):
    Path("in.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in made_articles(20)))
    with pytest.raises(UserError, match="no field 'text': its fields are body"):
        prepared("in.jsonl")
    prepared("in.jsonl", "two", source={"column": "body"})


def test_something_else_at_the_place_of_the_corpus_is_left_alone(prepared):
    write_jsonl(Path("in.jsonl"), made_articles(40))
    Path("prepared/out").mkdir(parents=True)
    Path("prepared/out/mine").write_text("precious")
    with pytest.raises(UserError, match="something is there already"):
        prepared("in.jsonl")
    assert Path("prepared/out/mine").read_text() == "precious"


def test_remote_paths_are_read_through_fsspec(prepared, small_pieces):
    import zipfile

    small_pieces(2000)
    write_jsonl(Path("in.jsonl"), made_articles(40))
    with zipfile.ZipFile("far.zip", "w") as archive:
        archive.write("in.jsonl", "news/in.jsonl")
    near, far = prepared("in.jsonl", "near"), prepared("zip://news/*.jsonl::far.zip", "far")
    assert open_corpus(near).fingerprint == open_corpus(far).fingerprint
