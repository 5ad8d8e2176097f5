import json
import resource
import signal

import pytest
import torch

from pkm.errors import UserError
from pkm.inference.export import WEIGHTS, export, load_exported
from pkm.inference.generate import generate
from pkm.inference.source import source
from pkm.inference.trained import load_trained
from tests.support.fork import error_of, without_root

TODAY = {
    "positions": "rotary", "norm": "pre", "norm_type": "rms", "activation": "swiglu", "kv_heads": 1, "qk_norm": True,
    "bias": False, "tie_embeddings": False, "logit_cap": 20.0, "document_mask": True, "experts": {"count": 3, "at": [1]},
}  # fmt: skip


@pytest.fixture
def exported(train, tmp_path, request):
    *_, directory = train(optim={"steps": 4}, model=getattr(request, "param", {}))
    trained = load_trained(directory, "latest")
    export(trained, tmp_path / "exported")
    return trained, tmp_path / "exported"


@pytest.mark.parametrize("exported", [{}, TODAY], ids=["2019", "today"], indirect=True)
def test_an_exported_model_computes_what_the_run_computes(exported):
    trained, directory = exported
    again = load_exported(directory, ("device=cpu",))
    ids = torch.randint(14, 50, (2, 8), generator=torch.Generator().manual_seed(1))
    assert torch.equal(trained.model.hidden(ids), again.model.hidden(ids))
    prompt = {"prompt": "w1 w3", "tokens": 12, "seeds": [3, 4]}
    assert generate(trained.model, trained.corpus.encoder(), **prompt) == generate(again.model, again.encoder, **prompt)


def test_a_model_whose_values_were_kept_in_bf16_is_found_and_exported(train, tmp_path):
    *_, run = train(optim={"steps": 4, "values": {"dtype": "bf16"}})
    trained = load_trained(run, "latest")
    export(trained, tmp_path / "exported")
    name = "blocks.1.memory.values.weight"
    values, again = (one.model.state_dict()[name] for one in (trained, load_exported(tmp_path / "exported")))
    assert values.dtype is torch.bfloat16
    assert torch.equal(values.float(), again.float())


def test_a_run_that_may_not_be_looked_into_is_named(tmp_path):
    run = tmp_path / "run"
    run.mkdir(mode=0)
    assert f"{run}: no permission" in error_of(lambda: load_trained(run), UserError, before=without_root)


def test_weights_that_may_not_be_read_are_named(exported):
    _, directory = exported
    (directory / WEIGHTS).chmod(0)
    for read in (load_exported, source):
        error = error_of(lambda read=read: read(directory), UserError, before=without_root)
        assert f"{directory / WEIGHTS}: no permission" in error


def test_nothing_is_overwritten(exported, tmp_path):
    trained, directory = exported
    with pytest.raises(UserError, match="there already"):
        export(trained, directory)
    (tmp_path / "again.tmp").mkdir()
    (tmp_path / "again").mkdir()
    export(trained, tmp_path / "again")
    assert (tmp_path / "again.tmp").is_dir() and (tmp_path / "again" / WEIGHTS).is_file()


def test_a_full_disk_is_said_and_leaves_nothing(exported, tmp_path):
    trained, _ = exported

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    said = error_of(lambda: export(trained, tmp_path / "again"), UserError, before=fill)
    assert "again" in said and "large" in said
    assert not list(tmp_path.glob("again*"))


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json", "vocab", "codes", "config.yaml"])
def test_a_missing_or_cut_file_is_named(exported, name):
    _, directory = exported
    file = directory / name
    file.write_bytes(file.read_bytes()[:3])
    if name in (WEIGHTS, "tokenizer.json", "config.yaml"):
        with pytest.raises(UserError, match=name):
            load_exported(directory)
    file.unlink()
    with pytest.raises(UserError, match=name):
        load_exported(directory)


def test_weights_of_another_model_are_refused(exported):
    _, directory = exported
    config = (directory / "config.yaml").read_text()
    (directory / "config.yaml").write_text(config.replace("dim: 16", "dim: 32"))
    with pytest.raises(UserError, match="do not fit"):
        load_exported(directory)


def test_the_directory_needs_nothing_but_itself(exported):
    _, directory = exported
    files = {p.name for p in directory.iterdir()}
    assert files == {WEIGHTS, "config.yaml", "codes", "vocab", "tokenizer.json"}
    assert json.loads((directory / "tokenizer.json").read_text())["encoder"]["escape"] is False
