"""What is exported for transformers, loaded by it in a process that has not seen pkm, against what pkm computes."""

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
from array import array
from dataclasses import replace

import pytest
import torch

from pkm.config.kinds import GATES, KEYS, READS
from pkm.config.schema import MemoryConfig, ModelConfig, QueryConfig
from pkm.corpus.store import open_corpus
from pkm.corpus.writer import write_manifest
from pkm.errors import UserError
from pkm.inference.generate import generate
from pkm.inference.hugging_face import export
from pkm.inference.hugging_face.export import INDEX, export_hugging_face, refuse_unknown, write_tokenizer
from pkm.inference.trained import load_trained
from pkm.text.vocab import Vocab
from tests.support.fork import error_of
from tests.support.tiny import tiny_config
from tests.text.goldens import golden

MODERN = {
    "positions": "rotary",
    "norm": "pre",
    "norm_type": "rms",
    "norm_eps": 1e-6,
    "activation": "swiglu",
    "bias": False,
    "embedding_norm": False,
}
BLOCKS = {
    "2019": {},
    "learned, pre": {"norm": "pre", "activation": "relu2"},
    "llama with a memory": MODERN,
    "everything": {
        **MODERN, "kv_heads": 1, "qk_norm": True, "tie_embeddings": False, "logit_cap": 5.0, "window": 5,
        "rotary": {"base": 500.0, "pairs": "neighbours"}, "experts": {"count": 3, "at": [1]}, "embedding_norm": True,
    },
    "experts of one": {"positions": "none", "activation": "relu", "experts": {"count": 4, "active": 1, "at": [1]}},
}  # fmt: skip
ULTRAMEM = {
    "keys": "tucker",
    "sub_keys": 6,
    "rank": 2,
    "cores": 2,
    "expansion": 4,
    "knn": 5,
    "values_dim": 6,
    "keys_norm": "rms",
    "query": {"dim": 8, "norm": "rms"},
    "place": "beside",
}
NGRAMS = {"keys": "ngram", "sub_keys": None}
MEMORIES = {
    "as in the paper": {},
    "beside, layer norm, hidden": {"place": "beside", "query": {"norm": "layer", "hidden": [6, 4]}},
    "memory+": {
        "layers": [1, 2], "share_values": True, "gate": "silu", "query": {"norm": "rms"}, "keys_norm": "rms",
    },
    "experts": {
        "read": "experts", "keys_shared_by_heads": True, "activation": "silu", "layers": [1, 2], "share_values": True,
    },
    "flat, normalised": {"keys": "flat", "sub_keys": None, "slots": 30, "keys_norm": "rms", "gate": "silu", "read": "experts"},
    "values of another width": {"values_dim": 5},
    "gated values of another width": {"values_dim": 24, "gate": "silu", "read": "experts"},
    "norm of halves": {"query": {"norm": "layer_halves", "dim": 12}},
    "two in a block": [
        {"layers": [2], "sub_keys": 8, "heads": 2, "knn": 3, "query": {"dim": 8}},
        {"layers": [1, 2], "sub_keys": 5, "heads": 1, "knn": 2, "query": {"dim": 4}, "place": "after"},
    ],
    "ultramem": {**ULTRAMEM, "layers": [1, 2], "share_values": True},
    "ultramem, one core and row, heads share keys": {
        **ULTRAMEM, "cores": 1, "expansion": 1, "rank": 3, "keys_shared_by_heads": True, "gate": "silu",
    },
    "ultramem v2": {
        **ULTRAMEM, "read": "experts-linear", "input_dim": 3, "values_dim": 5, "queries_by_rank": True, "layers": [1, 2],
        "share_values": True,
    },
    "ultramem, added a block later": {**ULTRAMEM, "layers": [1], "skip": 1},
    "engram": {**NGRAMS, "orders": [2, 3], "heads": 2, "slots": 20, "gate": "engram", "place": "before", "layers": [1, 2]},
    "engram with a convolution": {
        **NGRAMS, "orders": [1, 2], "slots": 20, "gate": "engram", "convolution": 3, "place": "before", "layers": [1, 2],
    },
    "bigrams": {**NGRAMS, "orders": [2], "heads": 1, "slots": 50, "place": "before", "values_std": 1.0, "layers": [1, 2]},
    "n-grams behind a gate, in place of a network": {
        **NGRAMS, "orders": [1, 4], "heads": 3, "slots": 30, "gate": "silu", "values_dim": 6,
    },
    "all kinds": [
        {"layers": [2], "sub_keys": 8, "heads": 2, "knn": 3, "query": {"dim": 8}},
        {**ULTRAMEM, "layers": [1], "skip": 1},
        {**NGRAMS, "layers": [1, 2], "orders": [2], "slots": 50, "place": "before", "values_std": 1.0},
        {**NGRAMS, "layers": [2], "orders": [3], "slots": 40, "gate": "engram", "place": "beside", "convolution": 2},
    ],
    "after, flat, no norm": {"place": "after", "keys": "flat", "sub_keys": None, "slots": 30, "query": {"norm": "none"}},
}  # fmt: skip
LLAMA = {**MODERN, "kv_heads": 1, "tie_embeddings": False}

# Loads a directory and prints what it computes, for each line that it is asked; pkm is not to be found by it.
PROGRAM = """
import contextlib, json, sys, torch
sys.modules["pkm"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
for line in sys.stdin:
    asked = json.loads(line)
    if "only" in asked:
        tokenizer = AutoTokenizer.from_pretrained(asked["directory"], trust_remote_code=True)
        print(json.dumps([tokenizer(text)["input_ids"] for text in asked["only"]]), flush=True)
        continue
    load = {"pretrained_model_name_or_path": asked["directory"], "trust_remote_code": True}
    ids = torch.tensor(asked["ids"])
    padded = torch.nn.functional.pad(ids[:, 2:], (2, 0), value=2)
    mask = torch.ones_like(padded)
    mask[:, :2] = 0
    if asked["task"] == "train":
        found = {}
        for way in ("plain", "checkpointed", "autocast"):
            model = AutoModelForCausalLM.from_pretrained(**load).train()
            if way != "plain":
                model.gradient_checkpointing_enable()
            torch.manual_seed(1)
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                loss = model(padded, attention_mask=mask, labels=padded.where(mask == 1, -100)).loss
            loss.backward()
            tensors = [*(p.grad for p in model.parameters()), *model.buffers()]
            found[way] = [loss.item(), *(t.double().norm().item() for t in tensors)]
        print(json.dumps(found), flush=True)
        continue
    if asked["task"] == "resize":
        model = AutoModelForCausalLM.from_pretrained(**load)
        before = model(ids).logits
        model.resize_token_embeddings(before.shape[-1] + 3)
        after = model(ids).logits
        new = model(ids.where(ids % 2 == 0, before.shape[-1])).logits
        found = {"ids": after.shape[-1] - before.shape[-1], "finite": bool(new.isfinite().all())}
        found["same"] = torch.equal(before, after[..., :-3])
        print(json.dumps(found), flush=True)
        continue
    tokenizer = AutoTokenizer.from_pretrained(**load)
    model, told = AutoModelForCausalLM.from_pretrained(**load, dtype=torch.float32, output_loading_info=True)
    found = {"class": type(model).__name__, "ids": [tokenizer(text)["input_ids"] for text in asked["texts"]]}
    found["told"] = {name: sorted(map(str, what)) for name, what in told.items() if what}
    found["texts"] = [tokenizer.decode(ids) for ids in found["ids"]]
    loss = model(ids, labels=ids).loss
    loss.backward()
    found["loss"] = loss.item()
    found["moves"] = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    with torch.no_grad():
        found["logits"] = model(ids).logits.tolist()
        found["padded"] = model(padded, attention_mask=mask).logits[:, 2:].tolist()
        for cache in (True, False):
            made = model.generate(ids[:, :3], max_new_tokens=5, do_sample=False, use_cache=cache)
            found[f"cache {cache}"] = made.tolist()
            made = model.generate(padded[:, :4], attention_mask=mask[:, :4], max_new_tokens=4, do_sample=False, use_cache=cache)
            found[f"padded, cache {cache}"] = made[:, 2:].tolist()
            found[f"beams, cache {cache}"] = model.generate(ids[:, :3], max_new_tokens=5, num_beams=3, use_cache=cache).tolist()
        found["guessed"] = model.generate(ids[:1, :3], max_new_tokens=5, do_sample=False, prompt_lookup_num_tokens=2).tolist()
        fixed = {"cache_implementation": "static", "disable_compile": True}
        made = model.generate(padded[:, :4], attention_mask=mask[:, :4], max_new_tokens=4, do_sample=False, **fixed)
        found["padded, cache of a fixed size"] = made[:, 2:].tolist()
        found["alone"] = model.generate(ids[:, 2:4], max_new_tokens=4, do_sample=False).tolist()
        prompt = tokenizer(asked["prompt"], return_tensors="pt")
        found["text"] = tokenizer.decode(model.generate(**prompt, max_new_tokens=4, do_sample=False)[0])
    with contextlib.redirect_stdout(sys.stderr):
        model.save_pretrained(asked["again"], max_shard_size="3KB")
        tokenizer.save_pretrained(asked["again"])
    found["bf16"] = bool(model.bfloat16()(ids).logits.isfinite().all())
    print(json.dumps(found), flush=True)
"""
IDS = torch.randint(14, 50, (2, 8), generator=torch.Generator().manual_seed(1))
TEXTS = ["w1 w3", "w1 w3\n", "w1  w3\nw5 unheard-of\n\nw7", "", "</s> w1"]


@pytest.fixture(scope="module")
def transformers(tmp_path_factory):
    """Asks a process of its own, which has transformers and not pkm, for what it makes of a directory."""
    home = tmp_path_factory.mktemp("home")
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": (home / "errors").open("w")}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], text=True, cwd=home, env=environment, **pipes)

    def ask(directory, texts=None, task=None):
        asked = (
            {"directory": str(directory), "only": texts}
            if texts
            else {"directory": str(directory), "task": task, "texts": TEXTS, "ids": IDS.tolist(), "prompt": "w1 w3"}
        )
        process.stdin.write(json.dumps({**asked, "again": str(directory.with_name("again"))}) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline() or (home / "errors").read_text())

    yield ask
    process.stdin.close()
    process.wait()


def exported(train, tmp_path, model, memory, values=None):
    *_, run = train(optim={"steps": 4, "values": values or {}}, model=model, memory=memory)
    trained = load_trained(run, "latest")
    with torch.no_grad():  # far from uniform: what is not the same shows
        for name, p in trained.model.named_parameters():
            p.mul_(1.0 if "norm" in name or "gain" in name else 2.5)
            if name.endswith("convolution.weight"):  # which begins as 0
                p.normal_()
    export_hugging_face(trained, tmp_path / "exported")
    return trained, tmp_path / "exported"


def assert_the_same(trained, found):
    model, ids = trained.model, IDS
    with torch.no_grad():
        logits = model.logits(model.hidden(ids))
        loss = model(ids[:, :-1], ids[:, 1:]) / ids[:, 1:].numel()
        short = model.logits(model.hidden(ids[:, 2:]))
    torch.testing.assert_close(torch.tensor(found["logits"]), logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.tensor(found["padded"]), short, rtol=1e-5, atol=1e-5)
    assert found["cache True"] == found["cache False"] and found["beams, cache True"] == found["beams, cache False"]
    assert found["guessed"] == found["cache False"][:1]
    assert found["padded, cache True"] == found["padded, cache False"] == found["alone"]
    assert found["padded, cache of a fixed size"] == found["alone"]
    assert found["told"] == {} and found["moves"] and found["bf16"]
    encoder = trained.corpus.encoder()
    for text, ids_there, text_there in zip(TEXTS, found["ids"], found["texts"], strict=True):
        here = array("I")
        encoder.encode(text, here)
        expected = here.tolist() if text.endswith("\n") else here.tolist()[:-1]
        assert ids_there == [1, *expected]
        assert text_there == encoder.decode(expected)
    [text] = generate(model, encoder, "w1 w3", tokens=4, temperature=0)
    assert found["text"] == text
    return float(loss)


@pytest.mark.parametrize("model", BLOCKS.values(), ids=BLOCKS)
def test_transformers_computes_what_pkm_computes_whatever_the_block(train, tmp_path, transformers, model):
    trained, directory = exported(train, tmp_path, model, {})
    found = transformers(directory)
    assert found["class"] == "PkmForCausalLM"
    assert_the_same(trained, found)


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_transformers_computes_what_pkm_computes_whatever_the_memory(train, tmp_path, transformers, memory):
    trained, directory = exported(train, tmp_path, {}, memory)
    assert_the_same(trained, transformers(directory))


def test_values_kept_in_bf16_are_the_same_numbers_there(train, tmp_path, transformers):
    trained, directory = exported(train, tmp_path, {}, {}, {"dtype": "bf16"})
    found = transformers(directory)
    whole = trained.model.float()
    assert_the_same(replace(trained, model=whole), found)


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_a_llama_without_memory_is_a_llama_there_without_code(train, tmp_path, transformers, pairs):
    trained, directory = exported(train, tmp_path, {**LLAMA, "rotary": {"pairs": pairs}}, None)
    assert not (directory / "modeling_pkm.py").exists()
    found = transformers(directory)
    assert found["class"] == "LlamaForCausalLM"
    loss = assert_the_same(trained, found)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)


def test_the_loss_of_labels_is_ours_without_batch_statistics(train, tmp_path, transformers):
    trained, directory = exported(train, tmp_path, MODERN, {"query": {"norm": "layer"}})
    found = transformers(directory)
    assert found["loss"] == pytest.approx(assert_the_same(trained, found), rel=1e-5)


TRAINED = pytest.mark.parametrize(
    ("model", "memory"),
    [({}, {}), (BLOCKS["everything"], MEMORIES["all kinds"]), ({}, MEMORIES["memory+"])],
    ids=["2019", "everything", "memory+"],
)


@TRAINED
def test_it_trains_there_with_activation_checkpointing_and_under_autocast(train, tmp_path, transformers, model, memory):
    """Padded; with checkpoints the loss, every gradient and the statistics of batch normalisation are the same."""
    found = transformers(exported(train, tmp_path, model, memory)[1], task="train")
    assert found["checkpointed"] == pytest.approx(found["plain"], rel=1e-6)
    assert found["autocast"][0] == pytest.approx(found["plain"][0], rel=0.05)
    assert all(map(math.isfinite, found["autocast"]))


@TRAINED
def test_ids_that_are_added_there_change_no_logit_of_the_others(train, tmp_path, transformers, model, memory):
    found = transformers(exported(train, tmp_path, model, memory)[1], task="resize")
    assert found == {"ids": 3, "finite": True, "same": True}


def test_what_transformers_saves_again_loads_again(train, tmp_path, transformers):
    trained, directory = exported(train, tmp_path, {}, {})
    transformers(directory)
    assert (directory.with_name("again") / INDEX).is_file()
    assert_the_same(trained, transformers(directory.with_name("again")))


def test_values_lie_in_files_of_their_own_and_the_index_names_every_tensor(train, tmp_path, transformers):
    trained, _ = exported(train, tmp_path, {}, {"layers": [1, 2]})
    export_hugging_face(trained, tmp_path / "small", most_bytes=5000)
    index = json.loads((tmp_path / "small" / INDEX).read_text())
    files = index["weight_map"]
    assert files.keys() == trained.model.state_dict().keys()
    of_values = {file for name, file in files.items() if "values" in name}
    assert len(of_values) == 2 and len(set(files.values())) > 4
    assert not of_values & {file for name, file in files.items() if "values" not in name}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in trained.model.state_dict().values())
    assert_the_same(trained, transformers(tmp_path / "small"))


@pytest.mark.parametrize(("escape", "normalize"), [(False, None), (True, "xlm")])
def test_ids_are_those_of_the_corpus_on_news_and_on_what_breaks_tokenizers(tmp_path, transformers, escape, normalize):
    for name in ("codes10k", "vocab3000"):
        (tmp_path / name.rstrip("013k")).write_text(golden("bpe")[name])
    vocab = Vocab.load(tmp_path / "vocab")
    write_manifest(
        tmp_path, {"train": [], "valid": [], "test": []}, vocab, {"escape": escape, "normalize": normalize}, {}
    )
    (tmp_path / "exported").mkdir()
    corpus = open_corpus(tmp_path)
    write_tokenizer(corpus, 256, tmp_path / "exported")
    texts = [golden("moses")[f"{kind}.txt"][:200_000] for kind in ("news", "nasty", "fuzz")]
    for text, found in zip(texts, transformers(tmp_path / "exported", texts), strict=True):
        here = array("I")
        corpus.encoder().encode(text, here)
        assert found == [1, *(here if text.endswith("\n") else here[:-1])] and len(found) > 1000


def test_a_directory_that_holds_something_is_left_alone(train, tmp_path):
    trained, directory = exported(train, tmp_path, {}, {})
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(UserError, match=r"not empty\n.*fix: remove it"):
        export_hugging_face(trained, directory)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    (tmp_path / "empty").mkdir()
    export_hugging_face(trained, tmp_path / "empty")
    assert {path.name for path in (tmp_path / "empty").iterdir()} == before.keys()


def test_a_full_disk_is_said_and_leaves_nothing(train, tmp_path):
    trained, _ = exported(train, tmp_path, {}, {})

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    said = error_of(lambda: export_hugging_face(trained, tmp_path / "full"), UserError, before=fill)
    assert "full" in said and "large" in said
    assert not list(tmp_path.glob("*full*"))


def test_every_setting_and_kind_is_written():
    """A new one is refused by name until someone puts it into the written model's files and into these sets."""
    assert set(ModelConfig.model_fields) == export.MODEL
    assert set(MemoryConfig.model_fields) == export.MEMORY
    assert set(QueryConfig.model_fields) == export.QUERY
    for kind, known in {"keys": KEYS, "read": READS, "gate": GATES}.items():
        assert set(known) == export.KINDS[f"memory.{kind}"]


def test_a_kind_that_the_written_model_does_not_know_is_refused_by_name(monkeypatch):
    config = tiny_config()
    refuse_unknown(config)
    monkeypatch.setitem(export.KINDS, "memory.keys", {"flat"})
    with pytest.raises(UserError, match=r"memory\.keys: product is not yet"):
        refuse_unknown(config)
    monkeypatch.setattr(export, "MODEL", export.MODEL - {"logit_cap"})
    with pytest.raises(UserError, match=r"model\.logit_cap: 3\.0 is not yet"):
        refuse_unknown(tiny_config(model={"logit_cap": 3.0}))


def test_the_card_tells_data_numbers_and_settings(train, tmp_path):
    trained, directory = exported(train, tmp_path, {}, {})
    card = (directory / "README.md").read_text()
    for part in (
        "| train ",
        "2,400",
        "has no report of these weights",
        "sub_keys: 8",
        "trust_remote_code=True",
        "4 steps",
    ):
        assert part in card
    scored = {
        "tokens": 159,
        "words": 80,
        "documents": 4,
        "split": "test",
        "perplexity": 12.5,
        "loss": 2.5,
        "word_perplexity": 99.0,
        "word_loss": 4.6,
    }
    record = {"step": 4, "evaluation": scored | {"memories": {"2": {"percent": 81.25, "kl": 0.5}}}}
    (trained.directory / "report.json").write_text(json.dumps(record))
    export_hugging_face(trained, tmp_path / "reported")
    card = (tmp_path / "reported" / "README.md").read_text()
    assert re.search(r"perplexity per token +\| 12.50", card) and "usage 81.25 %" in card


def test_the_program_writes_it(train, tmp_path):
    *_, run = train(optim={"steps": 4})
    done = subprocess.run(
        [sys.executable, "scripts/export.py", run, tmp_path / "exported", "--format", "hf", "--checkpoint", "latest"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step 4" in done.stdout and (tmp_path / "exported" / "modeling_pkm.py").is_file()
