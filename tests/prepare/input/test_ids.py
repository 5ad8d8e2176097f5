"""pkm/prepare/input/ids.py: text that is tokenised already, in the formats of others."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from pkm.config.load import load
from pkm.corpus.store import open_corpus, verify
from pkm.errors import UserError, UserErrors
from pkm.inference.export import export
from pkm.prepare.settings import PrepareConfig, impossible
from tests.prepare.conftest import content, made_articles
from tests.support.tokenizer_files import tokenizer_file

END_ID, SIZE = 600, 1000
KNOWN = {"subwords": {"vocab_size": SIZE, "end_id": END_ID}}


def made_documents(count: int = 60) -> list[np.ndarray]:
    """Ids of documents of 5 to 60, all different, none of which is the end's."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, END_ID, rng.integers(5, 60)) for _ in range(count)]


def nanogpt(documents, path="x.bin", kind="<u2", before=False) -> Path:
    parts = ([[END_ID], ids] if before else [ids, [END_ID]] for ids in documents)
    np.concatenate([part for pair in parts for part in pair]).astype(kind).tofile(path)
    return Path(path)


def llm_c(documents, path="x.bin", magic=20240520, version=1, kind="<u2") -> Path:
    stream = np.fromfile(nanogpt(documents, path, kind, before=True), kind)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(stream)
    Path(path).write_bytes(header.tobytes() + stream.tobytes())
    return Path(path)


def megatron(documents, path="x.bin", code=8, kind="<u2", sequences_each=1, version=1) -> Path:
    """As Megatron's builder writes: each document as so many sequences, an end behind the last."""
    sequences, first = [], [0]
    for ids in documents:
        sequences += np.array_split(np.append(ids, END_ID), sequences_each)
        first.append(len(sequences))
    lengths = np.array([len(one) for one in sequences], "<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8") * np.dtype(kind).itemsize
    np.concatenate(sequences).astype(kind).tofile(path)
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, len(lengths), len(first))
    Path(path).with_suffix(".idx").write_bytes(
        head + lengths.tobytes() + pointers.tobytes() + np.array(first, "<i8").tobytes()
    )
    return Path(path)


def parquet(documents, path="x.parquet", kind=None) -> Path:
    kind = kind or pa.list_(pa.int32())
    pa.parquet.write_table(
        pa.table({"input_ids": pa.array([d.tolist() for d in documents], kind)}), path, row_group_size=9
    )
    return Path(path)


FORMATS = {
    "nanogpt": (nanogpt, {"format": "nanogpt"}),
    "nanogpt, ends in front": (lambda d: nanogpt(d, before=True), {"format": "nanogpt"}),
    "llm.c": (llm_c, {"format": "llm.c"}),
    "llm.c of llama 3": (lambda d: llm_c(d, magic=20240801, version=7, kind="<u4"), {"format": "llm.c"}),
    "megatron": (megatron, {"format": "megatron"}),
    "megatron, int32, in sequences": (
        lambda d: megatron(d, code=4, kind="<i4", sequences_each=3),
        {"format": "megatron"},
    ),
    "parquet": (parquet, {"format": "parquet-ids", "column": "input_ids"}),
    "parquet, large lists of uint16": (
        lambda d: parquet(d, kind=pa.large_list(pa.uint16())),
        {"format": "parquet-ids", "column": "input_ids"},
    ),
}


@pytest.mark.parametrize("write, source", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("piece", [10**6, 300])
def test_every_document_is_in_one_split_with_one_end_and_training_keeps_their_order(
    prepared, small_pieces, write, source, piece
):
    small_pieces(piece)
    documents = made_documents()
    path = prepared(str(write(documents)), source=source, **KNOWN)
    corpus = open_corpus(path)
    verify(corpus)
    if piece == 300:
        assert len(list(path.glob("train-*.bin"))) > 3
    found = {}
    for split in (corpus.train, corpus.valid, corpus.test):
        found[split.name] = [tuple(split.document(i).tolist()) for i in range(split.documents)]
        assert (split.words, split.bytes) == (0, 0)
    expected = [(*ids.tolist(), END_ID) for ids in documents]
    assert sorted(found["train"] + found["valid"] + found["test"]) == sorted(expected)
    assert found["train"] == [ids for ids in expected if ids not in found["valid"] + found["test"]]
    assert corpus.manifest["vocab_size"] == SIZE and corpus.vocab.end_id == END_ID
    assert not {"tokenizer.json", "codes", "vocab"} & {file.name for file in path.iterdir()}


def test_the_formats_give_the_same_ids_whatever_the_pieces_and_workers(prepared, small_pieces):
    documents, results = made_documents(), []
    for number, (write, source) in enumerate(FORMATS.values()):
        small_pieces((10**6, 250, 333, 1001)[number % 4])
        corpus = open_corpus(
            prepared(str(write(documents)), f"out{number}", source=source, workers=1 + number % 2, **KNOWN)
        )
        results.append([split.read(0, 10**6).tolist() for split in (corpus.train, corpus.valid, corpus.test)])
    assert all(result == results[0] for result in results)


def test_documents_given_twice_are_dropped_and_none_is_lost_at_the_edge_of_what_is_looked_at(prepared, monkeypatch):
    from pkm.prepare.input import ids

    documents = made_documents()
    nanogpt(documents + documents[:5])
    seen = []
    for number, at_once in enumerate((1, 2, 7, 64, 1 << 20)):
        monkeypatch.setattr(ids, "AT_ONCE", at_once)
        corpus = open_corpus(prepared("x.bin", f"out{number}", source={"format": "nanogpt"}, **KNOWN))
        assert corpus.manifest["dropped"] == {"duplicate": 5} and corpus.manifest["records"] == 65
        seen.append(corpus.fingerprint)
    assert len(set(seen)) == 1


def test_with_the_tokenizer_ids_have_words_bytes_and_filters_and_are_the_corpus_of_the_text(prepared):
    Path("tokenizer.json").write_text(tokenizer_file("byte-level"))
    alone = Tokenizer.from_str(tokenizer_file("byte-level"))
    articles = [*made_articles(60), "short one"]
    pa.parquet.write_table(
        pa.table({"text": articles, "ids": [alone.encode(text).ids for text in articles]}), "x.parquet"
    )
    settings = {"subwords": {"tokenizer": "tokenizer.json"}, "filters": {"language": None, "min_words": 3}}
    settings["held_out"] = {"valid": 0, "test": 0}
    of_text = open_corpus(prepared("x.parquet", "text", **settings))
    source = {"format": "parquet-ids", "column": "ids"}
    of_ids = open_corpus(prepared("x.parquet", "ids", source=source, **settings))
    assert of_ids.manifest["dropped"] == of_text.manifest["dropped"] == {"too_short": 1}
    assert of_ids.fingerprint == of_text.fingerprint
    assert of_ids.manifest["splits"] == of_text.manifest["splits"]
    assert of_ids.encoder().decode(of_ids.train.document(2)) == articles[2]


def corrupted(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def in_idx(change):
    def write(documents):
        path = megatron(documents)
        index = path.with_suffix(".idx")
        index.write_bytes(change(index.read_bytes()))
        return path

    return write


def in_bin(writer, change):
    def write(documents):
        path = writer(documents)
        path.write_bytes(change(path.read_bytes()))
        return path

    return write


def without_idx(documents):
    path = megatron(documents)
    path.with_suffix(".idx").unlink()
    return path


def with_id(writer, wrong):
    return lambda documents: writer([*documents[:3], np.array([1, 2, wrong, 3]), *documents[3:]])


DAMAGE = {
    "nanogpt, cut within an id": ("nanogpt", in_bin(nanogpt, lambda d: d[:-1]), r"x\.bin, byte \d+: .*ends within one"),
    "nanogpt, an id too large": (
        "nanogpt",
        with_id(nanogpt, 1000),
        r"x\.bin, byte \d+, id 2 of its document: the id 1000",
    ),
    "nanogpt, header of llm.c": ("nanogpt", llm_c, r"x\.bin, byte 0: it begins with llm\.c's header"),
    "llm.c, no header": ("llm.c", nanogpt, r"x\.bin, byte 0: its header has magic \d+"),
    "llm.c, other version": ("llm.c", lambda d: llm_c(d, version=2), "magic 20240520, version 2"),
    "llm.c, cut": ("llm.c", in_bin(llm_c, lambda d: d[:-2]), r"x\.bin, byte \d+: its header says \d+ ids"),
    "llm.c, cut in the header": (
        "llm.c",
        in_bin(llm_c, lambda d: d[:500]),
        r"x\.bin, byte 500: it ends here, 524 bytes early",
    ),
    "llm.c, an id too large": ("llm.c", with_id(llm_c, 65000), "the id 65000 is none of a vocabulary of 1000"),
    "megatron, no index": ("megatron", without_idx, r"x\.idx: no such file"),
    "megatron, other magic": (
        "megatron",
        in_idx(lambda d: corrupted(d, 0, b"TNTIDX\0\0\0")),
        r"x\.idx, byte 0: .*MMIDIDX",
    ),
    "megatron, other version": ("megatron", lambda d: megatron(d, version=2), r"x\.idx, byte 9: it is of version 2"),
    "megatron, ids that are floats": ("megatron", lambda d: megatron(d, code=6), r"x\.idx, byte 17: .*type 6"),
    "megatron, index cut": ("megatron", in_idx(lambda d: d[:-3]), r"x\.idx, byte \d+: it ends here, 3 bytes early"),
    "megatron, more sequences than memory holds": (
        "megatron",
        in_idx(lambda d: corrupted(d, 18, struct.pack("<Q", 2**62))),
        r"x\.idx, byte \d+: it ends here, \d+ bytes early",
    ),
    "megatron, index cut in the head": ("megatron", in_idx(lambda d: d[:20]), r"x\.idx, byte 20: it ends here"),
    "megatron, ids cut": (
        "megatron",
        in_bin(megatron, lambda d: d[:-2]),
        r"x\.bin, byte \d+: sequence 59 is said to end at",
    ),
    "megatron, negative length": (
        "megatron",
        in_idx(lambda d: corrupted(d, 34, struct.pack("<i", -4))),
        r"x\.idx, byte 34: sequence 0 has a negative length",
    ),
    "megatron, documents out of order": (
        "megatron",
        in_idx(lambda d: corrupted(d, 34 + 60 * 12, struct.pack("<q", 7))),
        r"x\.idx, byte 754: its documents do not cover its 60 sequences",
    ),
    "megatron, a negative id": (
        "megatron",
        lambda d: megatron([*d, np.array([5, -1])], code=4, kind="<i4"),
        r"x\.bin, document 60, id 1 of its document: the id -1",
    ),
    "parquet, cut": ("parquet-ids", in_bin(parquet, lambda d: d[:-9]), r"x\.parquet, row group 0: it cannot be read"),
    "parquet, text": (
        "parquet-ids",
        lambda d: pa.parquet.write_table(pa.table({"input_ids": ["a"]}), "x.parquet") or "x.parquet",
        "holds string, not lists of integers",
    ),
    "parquet, a null among ids": (
        "parquet-ids",
        lambda d: pa.parquet.write_table(pa.table({"input_ids": [[1], [1, None]]}), "x.parquet") or "x.parquet",
        "row group 0, row 1: a list of ids has a null",
    ),
    "parquet, an id too large": (
        "parquet-ids",
        with_id(parquet, 1000),
        r"row group 0, row 3, id 2 of its document: the id 1000",
    ),
}


@pytest.mark.parametrize("format, write, message", DAMAGE.values(), ids=DAMAGE)
def test_what_is_wrong_is_said_with_file_and_place(prepared, format, write, message):
    column = {"column": "input_ids"} if format == "parquet-ids" else {}
    path = str(write(made_documents()))
    with pytest.raises(UserError, match=message):
        prepared(path, source={"format": format, **column}, **KNOWN)
    assert not Path("prepared/out").exists()


def test_a_wrong_end_shows_as_a_document_that_is_too_long(prepared):
    nanogpt(made_documents())
    with pytest.raises(UserError, match=r"x\.bin, byte 0: a document has more than 262 ids\n.*end_id") as error:
        prepared(
            "x.bin",
            source={"format": "nanogpt"},
            subwords={"vocab_size": SIZE, "end_id": 999},
            limits={"document_megabytes": 0.001},
        )
    assert "999" in error.value.fix


def test_other_files_of_a_folder_are_passed_over_and_an_empty_one_holds_nothing(prepared):
    Path("d").mkdir()
    nanogpt(made_documents(), "d/train.bin")
    Path("d/meta.pkl").write_bytes(b"x")
    Path("d/empty.bin").write_bytes(b"")
    corpus = open_corpus(prepared("d", source={"format": "nanogpt"}, **KNOWN))
    assert corpus.manifest["records"] == 60 and corpus.manifest["left_out"] == {".pkl": 1}
    Path("d/x.bin.gz").write_bytes(b"x")
    with pytest.raises(UserError, match=r"does not tell.*\n.*none that are compressed"):
        prepared("d/x.bin.gz", "other", source={"format": "nanogpt"}, **KNOWN)


def test_ids_that_begin_as_a_compressed_file_does_are_ids(prepared):
    nanogpt([np.array([0x8B1F, 0x0008, 7]), *made_documents()])
    corpus = open_corpus(
        prepared("x.bin", source={"format": "nanogpt"}, subwords={"vocab_size": 50000, "end_id": END_ID})
    )
    assert corpus.manifest["records"] == 61


SETTINGS = {
    "beside text": ([{"path": "a", "format": "nanogpt"}, {"path": "b"}], {}, {}, r"sources\[1\].format.*it is text \(auto\)"),
    "no meaning": ([{"path": "a", "format": "nanogpt"}], {"vocab_size": None, "end_id": None}, {}, "vocab_size.*mean is not said"),
    "meaning twice": ([{"path": "a", "format": "megatron"}], {"tokenizer": "t"}, {}, "vocab_size: subwords.tokenizer says it"),
    "an end outside": ([{"path": "a", "format": "llm.c"}], {"end_id": SIZE}, {}, "1000 is none of the ids 0 to 999"),
    "learning": ([{"path": "a", "format": "nanogpt"}], {"learn": "byte-level"}, {}, "learn.*a tokenizer that is there already"),
    "a language": ([{"path": "a", "format": "nanogpt"}], {}, {"filters": {"language": "en"}}, "filters.language.*their numbers"),
    "an end of text": ([{"path": "a"}], {"vocab_size": None}, {}, "subwords.end_id.*it goes with sources of ids"),
}  # fmt: skip


@pytest.mark.parametrize("sources, subwords, more, message", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_contradict_ids_are_refused(tmp_path, sources, subwords, more, message):
    settings = {"name": "a", "sources": sources, "filters": {"language": None}, **more}
    settings["subwords"] = {"vocab_size": SIZE, "end_id": END_ID, **subwords}
    (tmp_path / "c.yaml").write_text(json.dumps(settings))
    with pytest.raises(UserErrors, match=message):
        load(tmp_path / "c.yaml", [], PrepareConfig, impossible)


def test_another_vocabulary_reads_anew_and_the_same_settings_go_on(prepared, monkeypatch):
    from pkm.prepare import pipeline

    nanogpt(made_documents())
    with monkeypatch.context() as broken:
        broken.setattr(pipeline, "_assemble", None)
        with pytest.raises(TypeError):
            prepared("x.bin", source={"format": "nanogpt"}, **KNOWN)
    with pytest.raises(UserError, match="none of a vocabulary of 100"):
        prepared("x.bin", source={"format": "nanogpt"}, subwords={"vocab_size": 100, "end_id": 3})
    one = content(prepared("x.bin", source={"format": "nanogpt"}, **KNOWN))
    two = content(prepared("x.bin", "other", source={"format": "nanogpt"}, **KNOWN))
    two["manifest.json"] = two["manifest.json"].replace(b'"other"', b'"out"')
    assert one == two


def test_a_run_on_ids_alone_scores_tokens_and_says_why_it_has_no_words_and_generates_nothing(prepared, train, tmp_path):
    import torch

    from pkm.device import Compute
    from pkm.evaluation.evaluate import evaluate, measure_speed
    from pkm.evaluation.recall import recall
    from pkm.evaluation.report import report_markdown, report_record
    from pkm.inference.trained import load_trained

    nanogpt(made_documents(200))
    path = prepared("x.bin", source={"format": "nanogpt"}, **KNOWN)
    *_, directory = train(optim={"steps": 2}, corpus={"path": str(path)})
    trained = load_trained(directory, "latest")
    compute = Compute(torch.device("cpu"), "fp32")
    found = evaluate(trained.model, trained.corpus, trained.corpus.test, trained.config, compute)
    speed = measure_speed(trained.model, trained.corpus, trained.corpus.test, trained.config, compute, seconds=0.01)
    assert found.perplexity > 1 and (found.word_loss, found.word_perplexity, found.bits_per_byte) == (None, None, None)
    text = report_markdown(report_record(trained.config, trained.model, 2, found, speed), found, speed)
    assert "(not known) | - " in text and "the text came as ids" in text
    with pytest.raises(UserError, match="nobody knows where a name or a number stands"):
        recall(trained.model, trained.corpus, trained.config, compute, step=2, facts=3)
    with pytest.raises(UserError, match="prepared from ids"):
        trained.corpus.encoder()
    with pytest.raises(UserError, match="prepared from ids"):
        export(trained, tmp_path / "exported")
    assert not list(tmp_path.glob("exported*"))
