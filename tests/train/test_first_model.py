"""Runs that begin with a trained model's weights, and memories put into it."""

import json
import re
import shutil

import pytest
import torch

import train as program
from pkm.config.schema import Config
from pkm.corpus.store import fingerprint_of
from pkm.errors import UserError
from pkm.files import sha256
from pkm.inference.export import export
from pkm.inference.hugging_face.export import export_hugging_face
from pkm.inference.imported import import_model
from pkm.inference.trained import load_trained
from pkm.model.transformer import build_model
from tests.support.tiny import VOCAB_SIZE, random_corpus, tiny_config

PRE = {"norm": "pre"}
LLAMA = {
    "positions": "rotary", "norm": "pre", "norm_type": "rms", "activation": "swiglu", "bias": False, "embedding_norm": False,
}  # fmt: skip
IDS = torch.randint(14, VOCAB_SIZE, (3, 9), generator=torch.Generator().manual_seed(1))
MEMORY = {"layers": [2], "sub_keys": 8, "heads": 2, "knn": 3, "query": {"dim": 8}, "place": "beside"}
STILL = {"dense": {"lr": 1e-30}, "values": {"lr": 1e-30}}


@pytest.fixture
def dense(train):
    """Trains a model without memory: its run, its weights, its loss."""

    def go(model=PRE):
        *_, run = train(name="dense", memory=None, model=model, optim={"steps": 5})
        trained = load_trained(run, "latest").model
        return run, trained.state_dict(), loss_of(trained)

    return go


def loss_of(model):
    with torch.no_grad():
        return float(model.eval()(IDS[:, :-1], IDS[:, 1:])) / IDS[:, 1:].numel()


@pytest.mark.parametrize(
    ("model", "memory"),
    [
        (PRE, MEMORY),
        ({}, MEMORY),
        (PRE, MEMORY | {"place": "after"}),
        (LLAMA, [MEMORY, MEMORY | {"place": "after", "layers": [1, 2], "share_values": True}]),
        (LLAMA, MEMORY | {"gate": "silu", "read": "experts"}),
        (PRE, {"layers": [2], "keys": "ngram", "slots": 50, "place": "before"}),
    ],
    ids=["beside", "beside, post-norm", "after", "several", "gated experts", "n-grams"],
)
def test_the_first_loss_with_a_new_memory_is_the_trained_models(train, dense, capsys, model, memory):
    run, _, loss = dense(model)
    settings = {"init_from": str(run), "model": model, "memory": memory, "optim": {"steps": 1, **STILL}}
    began, *_ = train(name="on", **settings)
    assert loss_of(began) == pytest.approx(loss, rel=1e-6)
    said = capsys.readouterr().out
    assert f"init_from {run} (step 5): " in said and "the first loss is the trained model's\n" in said


def test_training_says_the_trained_models_loss_at_its_first_step(train, dense):
    """On the same batch as a run that goes on without a memory."""
    run, _, _ = dense()
    losses = []
    for name, memory in (("without", None), ("with", MEMORY)):
        settings = {"init_from": str(run), "model": PRE, "optim": {"steps": 1}, "log": {"every_steps": 1}}
        *_, directory = train(name=name, memory=memory, **settings)
        records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        losses.append(next(record["loss"] for record in records if record["kind"] == "train"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_what_came_is_the_trained_models_what_is_new_a_fresh_models_and_its_values_zero(train, dense):
    run, trained, _ = dense()
    settings = {"init_from": str(run), "model": PRE, "memory": MEMORY}
    began, *_ = train(name="on", optim={"steps": 1, **STILL}, **settings)
    fresh = build_model(tiny_config(model=PRE, memory=MEMORY), VOCAB_SIZE).state_dict()
    for name, tensor in began.state_dict().items():
        expected = torch.zeros(64, 16) if name.endswith("values.weight") else trained.get(name, fresh[name])
        if "running" not in name:  # the one step has moved these
            torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-7)
    learned, *_ = train(name="learned", optim={"steps": 15}, **settings)
    assert learned.state_dict()["blocks.1.memory.values.weight"].any()


def test_values_of_a_given_deviation_are_random(train, dense, capsys):
    run, _, loss = dense()
    settings = {"init_from": str(run), "model": PRE, "memory": MEMORY | {"values_std": 0.5}}
    began, *_ = train(name="on", optim={"steps": 1, **STILL}, **settings)
    assert began.state_dict()["blocks.1.memory.values.weight"].std() == pytest.approx(0.5, rel=0.1)
    assert loss_of(began) != pytest.approx(loss, rel=1e-3)
    assert "first loss" not in capsys.readouterr().out


def test_a_memory_in_place_of_a_trained_network_says_what_is_lost(train, dense, capsys):
    run, trained, _ = dense()
    settings = {"init_from": str(run), "model": PRE, "memory": MEMORY | {"place": "replace"}}
    began, *_ = train(name="on", optim={"steps": 1, **STILL}, **settings)
    said = capsys.readouterr().out
    assert "left out: blocks.1.feed_forward.contract.bias" in said
    assert "the first loss is not the trained model's: feed-forward networks are gone" in said
    torch.testing.assert_close(began.state_dict()["tokens.weight"], trained["tokens.weight"])


@pytest.mark.parametrize("kind", ["pkm", "hf", "llama", "imported"])
def test_an_export_or_a_directory_of_transformers_serves_as_well(train, dense, tmp_path, kind):
    model = LLAMA if kind == "llama" else PRE
    run, _, loss = dense(model)
    trained, there = load_trained(run, "latest"), tmp_path / "there"
    if kind == "pkm":
        export(trained, there)
    else:
        export_hugging_face(trained, there)
    if kind == "imported":
        import_model("hf", there, tmp_path / "runs" / "again")
        there = tmp_path / "runs" / "again"
    shutil.rmtree(run)
    settings = {"init_from": str(there), "model": model, "memory": MEMORY, "optim": {"steps": 1, **STILL}}
    began, *_ = train(name="on", **settings)
    assert loss_of(began) == pytest.approx(loss, rel=1e-6)


def test_a_models_own_memory_comes_with_it(train):
    *_, run = train(name="first", model=PRE, optim={"steps": 5})
    trained = load_trained(run, "latest").model
    began, *_ = train(name="on", init_from=str(run), model=PRE, optim={"steps": 1, **STILL})
    assert torch.equal(began.state_dict()["blocks.1.memory.values.weight"], trained.memory(2).values.weight)


def test_a_resumed_run_goes_on_from_its_own_checkpoint_and_needs_the_other_no_more(train, dense, capsys):
    run, _, _ = dense()
    settings = {"name": "on", "init_from": str(run), "model": PRE, "memory": MEMORY}
    train(optim={"steps": 5}, **settings)
    shutil.rmtree(run)
    capsys.readouterr()
    *_, state, _ = train(optim={"steps": 8}, **settings)
    said = capsys.readouterr().out
    assert state.step == 8 and "tensors came" not in said


REFUSED = {
    "heads": ({"model": PRE | {"heads": 4}}, r"model\.heads: 2 there, 4 here"),
    "all at once": ({"model": {"activation": "relu", "norm_eps": 1e-5}}, r"norm: pre there, post here; .*norm_eps"),
    "layers": ({"model": PRE | {"layers": 3}}, r"model\.layers: 2 there, 3 here"),
    "context": ({"corpus": {"context": 4}}, r"positions\.weight is \(8, 16\) there, and \(4, 16\) here"),
    "no such": ({"init_from": "nowhere"}, "neither config.yaml nor config.json"),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "said"), REFUSED.values(), ids=REFUSED)
def test_another_model_is_refused_by_the_names_of_what_differs_also_by_a_dry_run(
    train, dense, tiny_corpus_path, tmp_path, monkeypatch, settings, said
):
    run, _, _ = dense()
    settings = {"init_from": str(run), "model": PRE, "memory": MEMORY, "optim": {"steps": 1}} | settings
    with pytest.raises(UserError, match=said):
        train(name="on", **settings)
    with pytest.raises(UserError, match=said):
        dry_run(tiny_corpus_path, tmp_path, monkeypatch, settings)


@pytest.mark.parametrize("keys", ["product", "tucker"])
def test_a_dry_run_takes_a_trained_model_that_a_start_would_take(
    tiny_corpus_path, tmp_path, monkeypatch, dense, capsys, keys
):
    memory = MEMORY | {"keys": keys}
    settings = {"init_from": str(dense()[0]), "model": PRE, "memory": memory, "optim": {"steps": 1}}
    dry_run(tiny_corpus_path, tmp_path, monkeypatch, settings)
    assert "FLOPs per token" in capsys.readouterr().out


def dry_run(corpus, tmp_path, monkeypatch, settings):
    """train.py --dry-run of the tiny model with `settings`, in this process."""
    settings = {**settings, "corpus": {"path": str(corpus), **settings.get("corpus", {})}}
    path = tmp_path / "dry.yaml"
    config = tiny_config(runs=str(tmp_path / "runs"), name="dry", **settings)
    path.write_text(json.dumps(config.model_dump(mode="json")))
    monkeypatch.setattr("sys.argv", ["train.py", str(path), "--dry-run"])
    program.main.__wrapped__()


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        (MEMORY, None, r"its blocks\.1\.memory.* would be nothing in this model"),
        (MEMORY, MEMORY | {"knn": 2}, r"memory\.knn of layer 2: 3 there, 2 here"),
        (MEMORY, MEMORY | {"layers": [1]}, r"blocks\.1\.memory"),
        (MEMORY | {"place": "replace"}, MEMORY, r"memory\.place of layer 2: replace there, beside here"),
        (MEMORY | {"place": "replace"}, None, r"it has no blocks\.1\.feed_forward"),
    ],
    ids=["dropped", "knn", "elsewhere", "place", "no network"],
)
def test_a_memory_that_would_be_another_is_refused(train, there, here, said):
    *_, run = train(name="first", model=PRE, memory=there, optim={"steps": 5})
    with pytest.raises(UserError, match=said):
        train(name="on", init_from=str(run), model=PRE, memory=here, optim={"steps": 1})


def test_a_corpus_with_other_subwords_is_refused(train, dense, tmp_path):
    run, _, _ = dense()
    other = random_corpus(tmp_path / "other")
    (other / "vocab").write_text((other / "vocab").read_text().replace("w1 ", "x1 "))
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["vocab"]["sha256"] = sha256(other / "vocab")
    manifest["fingerprint"] = fingerprint_of(manifest)
    (other / "manifest.json").write_text(json.dumps(manifest))
    settings = {"init_from": str(run), "model": PRE, "memory": MEMORY, "optim": {"steps": 1}}
    with pytest.raises(UserError, match="trained with another vocab"):
        train(name="on", corpus={"path": str(other)}, **settings)


def test_every_setting_of_a_model_is_compared_or_known_not_to_matter():
    from pkm.train.first_model import MAY_DIFFER, compared

    config: Config = tiny_config(model={"positions": "rotary", "experts": {"count": 2, "active": 1, "at": [1]}})
    keys = {re.sub(r"^model\.(\w+).*", r"\1", key) for key, *_ in compared(config, config) if key.startswith("model.")}
    assert keys | MAY_DIFFER == set(type(config.model).model_fields) and MAY_DIFFER - keys == {
        "dropout",
        "document_mask",
    }
