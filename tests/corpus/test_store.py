"""pkm/corpus/store.py: what is on disk is what was written, or opening says what is wrong."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkm.corpus import writer
from pkm.corpus.store import Shard, fingerprint_of, open_corpus, verify
from pkm.corpus.writer import ShardWriter, write_manifest
from pkm.errors import UserError
from pkm.files import sha256
from pkm.text.vocab import Vocab


def write_shards(path: Path, documents: list[list[int]], cuts: list[int], size: int = 100) -> dict[str, list[Shard]]:
    """`documents` as training shards that end at `cuts`."""
    shards = []
    for number, (first, last) in enumerate(zip([0, *cuts], [*cuts, len(documents)], strict=True)):
        writer = ShardWriter(path, f"train-{number:05d}", size)
        for ids in documents[first:last]:
            writer.ids.extend(ids)
            writer.end_document(len(ids) // 2, 3 * len(ids))
        shards.append(writer.close())
    return {"train": shards, "valid": [], "test": []}


def write_corpus(path: Path, documents: list[list[int]], cuts: tuple[int, ...] = (), size: int = 100) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    vocab = Vocab([f"w{i}" for i in range(size - 14)], [1] * (size - 14))
    vocab.save(path / "vocab")
    (path / "codes").write_text("a b 3\n")
    tokenizer = {"escape": False, "normalize": None}
    write_manifest(path, write_shards(path, documents, list(cuts), size), vocab, tokenizer, {})
    return path


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    cut=st.lists(st.integers(0, 30), max_size=4),
    data=st.data(),
)
def test_reads_cross_shards_and_documents_start_where_they_were_written(tmp_path_factory, lengths, cut, data):
    ids = iter(range(10**6))
    documents = [[next(ids) % 90 for _ in range(length)] for length in lengths]
    flat = [i for document in documents for i in document]
    cuts = sorted({min(c, len(lengths)) for c in cut})
    path = write_corpus(tmp_path_factory.mktemp("c"), documents, tuple(cuts))
    split = open_corpus(path).train
    assert (split.documents, split.tokens) == (len(documents), len(flat))
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat) + 5))
    found = split.read(start, stop)
    assert found.dtype == np.int64 and found.tolist() == flat[start:stop]
    for i, document in enumerate(documents):
        assert split.document(i).tolist() == document
    assert split.document_start(len(documents)) == len(flat)


def test_ids_take_two_bytes_where_they_fit_and_four_elsewhere(tmp_path: Path):
    small = write_corpus(tmp_path / "small", [[1, 65535]], size=1 << 16)
    large = write_corpus(tmp_path / "large", [[1, 65536]], size=(1 << 16) + 1)
    assert (small / "train-00000.bin").read_bytes() == b"\x01\x00\xff\xff"
    assert (large / "train-00000.bin").read_bytes() == b"\x01\x00\x00\x00\x00\x00\x01\x00"
    assert open_corpus(large).train.read(0, 2).tolist() == [1, 65536]


def test_flushing_in_the_middle_of_a_shard_changes_nothing(tmp_path: Path, monkeypatch):
    documents = [[i % 90] * (i % 7) for i in range(50)]
    whole = write_corpus(tmp_path / "a", documents)
    monkeypatch.setattr(writer, "FLUSH_TOKENS", 8)
    flushed = write_corpus(tmp_path / "b", documents)
    for name in ("train-00000.bin", "train-00000.idx", "manifest.json"):
        assert (whole / name).read_bytes() == (flushed / name).read_bytes()


def test_a_shard_is_not_there_before_it_is_closed(tmp_path: Path):
    writer = ShardWriter(tmp_path, "train-00000", 100)
    writer.ids.append(5)
    writer.end_document(1, 1)
    assert not (tmp_path / "train-00000.bin").exists()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_splits_without_documents_are_none(tmp_path: Path):
    corpus = open_corpus(write_corpus(tmp_path / "c", [[1, 2]]))
    assert corpus.train is not None and corpus.valid is None and corpus.test is None
    assert open_corpus(write_corpus(tmp_path / "empty", [])).train is None


def test_the_fingerprint_changes_with_any_id_and_with_nothing_else(tmp_path: Path):
    documents = [[1, 2, 3], [4, 5]]
    first = open_corpus(write_corpus(tmp_path / "a", documents)).fingerprint
    assert open_corpus(write_corpus(tmp_path / "b", documents)).fingerprint == first
    assert open_corpus(write_corpus(tmp_path / "c", [[1, 2, 3], [4, 6]])).fingerprint != first
    assert open_corpus(write_corpus(tmp_path / "d", [[1, 2], [3, 4, 5]])).fingerprint != first


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda p: (p / "manifest.json").unlink(), "not a prepared corpus"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest is damaged"),
        (lambda p: (p / "manifest.json").write_text("[]"), "manifest is damaged"),
        (lambda p: edit(p, lambda m: m.update(format=99)), "format 99, this version of pkm reads 1"),
        (lambda p: edit(p, lambda m: m.pop("splits")), "manifest is damaged"),
        (lambda p: (p / "train-00000.bin").write_bytes(b"\x01\x00"), "2 bytes, its manifest says 10"),
        (lambda p: (p / "train-00001.idx").unlink(), "no such file"),
        (lambda p: (p / "vocab").write_text("w0 1\n"), "changed after the corpus was prepared"),
        (lambda p: (p / "codes").write_text("b a 1\n"), "changed after the corpus was prepared"),
        (lambda p: shrink_vocabulary(p), "the vocabulary has 15 entries, but the corpus holds id 50"),
    ],
)
def test_opening_names_what_is_wrong_and_how_to_fix_it(tmp_path: Path, harm, message):
    path = write_corpus(tmp_path / "c", [[1, 2, 50, 4, 5], [6, 7]], (1,))
    harm(path)
    with pytest.raises(UserError, match=message) as caught:
        open_corpus(path)
    assert caught.value.where and caught.value.fix


def edit(path: Path, change) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def shrink_vocabulary(path: Path) -> None:
    Vocab(["w0"], [1]).save(path / "vocab")

    def change(manifest):
        manifest["vocab"]["sha256"] = sha256(path / "vocab")
        manifest["fingerprint"] = fingerprint_of(manifest)

    edit(path, change)


def test_a_directory_that_is_not_there_says_how_to_prepare_one(tmp_path: Path):
    with pytest.raises(UserError, match=r"no such directory[\s\S]*scripts/prepare.py"):
        open_corpus(tmp_path / "absent")


def test_verify_finds_a_flipped_bit(tmp_path: Path):
    path = write_corpus(tmp_path / "c", [[1, 2, 3]])
    verify(open_corpus(path))
    content = bytearray((path / "train-00000.bin").read_bytes())
    content[2] ^= 1
    (path / "train-00000.bin").write_bytes(bytes(content))
    with pytest.raises(UserError, match=r"train-00000.bin.*hash differs"):
        verify(open_corpus(path))


def test_a_corpus_as_large_as_the_papers_opens_in_a_few_megabytes(tmp_path: Path):
    """40 million documents, 32 billion tokens in 550 shards: files with holes, so that they take no room."""
    path = write_corpus(tmp_path / "c", [])
    shards, documents, tokens = 550, 72_728, 58_000_000
    listed = []
    for number in range(shards):
        name = f"train-{number:05d}"
        for suffix, size in ((".bin", 2 * tokens), (".idx", 8 * documents)):
            with open(path / (name + suffix), "wb") as file:
                file.truncate(size)
        listed.append(Shard(name, documents, tokens, tokens, tokens, 99, "0" * 64, "0" * 64))
    with open(path / "train-00549.idx", "r+b") as file:
        file.seek(8 * (documents - 1))
        file.write((1234).to_bytes(8, "little"))
    vocab = Vocab.load(path / "vocab")
    write_manifest(path, {"train": listed, "valid": [], "test": []}, vocab, {"escape": False, "normalize": None}, {})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    split = open_corpus(path).train
    assert split.documents == 40_000_400
    assert split.document_start(split.documents - 1) == 549 * tokens + 1234
    assert split.read(split.tokens - 5, split.tokens).tolist() == [0] * 5
    # Kilobytes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000
