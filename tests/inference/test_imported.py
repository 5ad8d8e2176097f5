"""Models that come back, or come from elsewhere, as a run's directory."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from pkm.corpus.store import open_corpus
from pkm.errors import UserError
from pkm.inference.hugging_face.export import export_hugging_face
from pkm.inference.imported import import_model
from pkm.inference.trained import load_trained
from pkm.run.run import Run
from pkm.train.state import restore
from tests.inference.test_hugging_face import BLOCKS, LLAMA, MEMORIES
from tests.support.tiny import random_corpus


def both_ways(train, tmp_path, model, memory, before=lambda directory: None):
    """A run that was trained, and the run that its export was made into."""
    *_, run = train(optim={"steps": 4}, model=model, memory=memory)
    trained = load_trained(run, "latest")
    export_hugging_face(trained, tmp_path / "exported")
    before(tmp_path / "exported")
    path = f"corpus.path={trained.config.corpus.path}"
    import_model("hf", tmp_path / "exported", tmp_path / "runs" / "again", [path])
    return trained, load_trained(tmp_path / "runs" / "again")


def assert_equal(a, b):
    assert a.model.state_dict().keys() == b.model.state_dict().keys()
    for name, tensor in a.model.state_dict().items():
        assert torch.equal(tensor, b.model.state_dict()[name]), name


CASES = [(model, {}) for model in BLOCKS.values()] + [({}, memory) for memory in MEMORIES.values()] + [(LLAMA, None)]


@pytest.mark.parametrize(("model", "memory"), CASES, ids=[*BLOCKS, *MEMORIES, "llama"])
def test_what_was_exported_comes_back_bit_by_bit(train, tmp_path, model, memory):
    trained, again = both_ways(train, tmp_path, model, memory)
    assert_equal(trained, again)
    assert again.config.model == trained.config.model and again.config.memory == trained.config.memory
    assert (again.step, again.config.name) == (4, "again")


@pytest.mark.parametrize(
    ("model", "memory"),
    [
        (BLOCKS["everything"], {}),
        (LLAMA, None),
        *(({}, MEMORIES[name]) for name in ("two in a block", "memory+", "ultramem v2", "bigrams", "all kinds")),
    ],
    ids=["everything", "llama", "two in a block", "memory+", "ultramem v2", "bigrams", "all kinds"],
)
def test_the_settings_are_found_in_config_json_alone(train, tmp_path, model, memory):
    """As in a directory that transformers saved again."""
    trained, again = both_ways(train, tmp_path, model, memory, lambda directory: (directory / "config.yaml").unlink())
    assert_equal(trained, again)
    ids = torch.arange(14, 22).unsqueeze(0)
    assert torch.equal(trained.model.hidden(ids), again.model.hidden(ids))


def test_a_corpus_with_other_subwords_is_refused_and_one_with_the_same_is_read(train, tmp_path):
    _, again = both_ways(train, tmp_path, {}, {})
    other = random_corpus(tmp_path / "other", seed=5)
    path = (f"corpus.path={other}",)
    assert open_corpus(other).fingerprint != again.corpus.fingerprint
    assert_equal(again, load_trained(again.directory, overrides=path))
    shutil.rmtree(other)
    random_corpus(other)
    vocab = (other / "vocab").read_text().replace("w1 ", "x1 ")
    (other / "vocab").write_text(vocab)
    manifest = json.loads((other / "manifest.json").read_text())
    from pkm.corpus.store import fingerprint_of
    from pkm.files import sha256

    manifest["vocab"]["sha256"] = sha256(other / "vocab")
    manifest["fingerprint"] = fingerprint_of(manifest)
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="with another vocab: its ids would mean other words"):
        load_trained(again.directory, overrides=path)


def test_an_imported_run_does_not_go_on_and_says_what_does(train, tmp_path):
    _, again = both_ways(train, tmp_path, {}, {})
    resolved = (again.directory / "config.yaml").read_text()
    with (
        pytest.raises(UserError, match=r"was imported .*\n.*init_from=.*again"),
        Run.open(again.config, resolved) as run,
    ):
        restore(run, again.compute, again.model, None, again.corpus)


@pytest.fixture
def exported(train, tmp_path):
    *_, run = train(optim={"steps": 4})
    export_hugging_face(load_trained(run, "latest"), tmp_path / "exported")
    return tmp_path / "exported"


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda d: (d / "config.json").unlink(), "holds no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json: it is no JSON object"),
        (lambda d: (d / "config.yaml").write_text("a: ["), "config.yaml: it is damaged"),
        (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "the index is damaged"),
        (lambda d: (d / "model-00001-of-00002.safetensors").write_bytes(b"12345678"), "not a safetensors file"),
        (lambda d: (d / "model-00001-of-00002.safetensors").unlink(), "no such file"),
        (lambda d: edit(d, model_type="gpt2"), "model_type: gpt2 is nothing"),
        (lambda d: edit(d, hidden_size=32), r"attention\.out\.bias would be \(16,\) of the file, and of these settings it is \(32,\)"),
        (lambda d: edit(d, num_hidden_layers=1), r"exported: memory\[0\].layers: \[2\] names a layer that is not there"),
        (lambda d: edit(d, num_hidden_layers=3), r"blocks\.2\.\S+ would be nothing of the file"),
    ],
    ids=["no config", "config", "settings", "index", "damaged", "missing", "kind", "width", "fewer layers", "more layers"],
)  # fmt: skip
def test_what_cannot_be_read_is_said_and_leaves_nothing(exported, tmp_path, break_it, said):
    (exported / "config.yaml").unlink()
    break_it(exported)
    with pytest.raises(UserError, match=said):
        import_model("hf", exported, tmp_path / "runs" / "again", [])
    assert not [path for path in (tmp_path / "runs").iterdir() if "again" in path.name]


def edit(directory, **values):
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(described | values))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"head_dim": 64}, "head_dim: 64"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu"),
    ],
    ids=["rope", "bias", "heads", "activation"],
)
def test_a_llama_that_is_no_block_of_ours_is_refused_by_name(train, tmp_path, values, said):
    *_, run = train(optim={"steps": 4}, model=LLAMA, memory=None)
    export_hugging_face(load_trained(run, "latest"), tmp_path / "exported")
    edit(tmp_path / "exported", **values)
    with pytest.raises(UserError, match=said):
        import_model("hf", tmp_path / "exported", tmp_path / "again")


def test_a_directory_that_holds_something_is_left_alone(exported, tmp_path):
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "mine").write_text("x")
    with pytest.raises(UserError, match="not empty"):
        import_model("hf", exported, tmp_path / "again")
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("corpus.context=[", r"argument 'corpus\.context=\[': not valid YAML"),
        ("corpus.context=-3", r"corpus\.context must be a whole number > 0; found -3"),
        ("name=other", r"argument 'name=other': \S*again says it"),
    ],
)
def test_an_argument_that_cannot_be_is_said(exported, tmp_path, override, said):
    with pytest.raises(UserError, match=said):
        import_model("hf", exported, tmp_path / "again", [override])
    assert not (tmp_path / "again").exists()


def test_a_directory_whose_name_no_run_can_have_is_named_and_not_the_model(exported, tmp_path):
    with pytest.raises(UserError, match=r"my räume: a run cannot have that name\n +fix: .*letters, digits"):
        import_model("hf", exported, tmp_path / "my räume")
    assert not (tmp_path / "my räume").exists()


def test_what_was_exported_is_no_run_and_says_so(exported):
    with pytest.raises(
        UserError, match=r"no run's directory, but what scripts/export\.py wrote(.|\n)*import\.py --from hf"
    ):
        load_trained(exported)


def test_the_program_makes_a_run_that_generates(exported, tmp_path):
    corpus = next(line for line in (exported / "config.yaml").read_text().splitlines() if "path:" in line).split()[-1]
    arguments = ["--from", "hf", exported, tmp_path / "runs" / "again", f"corpus.path={corpus}", "threads=1"]
    done = subprocess.run([sys.executable, "scripts/import.py", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"whose text is to be in {corpus}" in done.stdout
    generate = [
        "scripts/generate.py",
        tmp_path / "runs" / "again",
        "--prompt",
        "w1 w3",
        "--tokens",
        "5",
        "--device",
        "cpu",
    ]
    done = subprocess.run([sys.executable, *generate], capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.split()) > 4, done.stderr
