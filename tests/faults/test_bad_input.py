"""What a user can get wrong: one clear message, exit code 2, no traceback, nothing lost."""

import json
import os
import shutil

import pytest

from pkm.corpus.store import Shard
from pkm.corpus.writer import write_manifest
from pkm.errors import UserError
from pkm.inference.trained import load_trained
from pkm.text.vocab import Vocab
from tests.support.fork import small_disk
from tests.support.tiny import random_corpus

SHARD, MANIFEST = "rank-00000.safetensors", "manifest.json"


def refused(ended, *parts):
    """Assert that a run was refused by one message with all these parts and a fix."""
    assert ended.code == 2, (ended.out, ended.err)
    assert "Traceback" not in ended.err and ended.err.count("error: ") == 1
    for part in (*parts, "fix: "):
        assert part in ended.err
    return ended.err


# ---- config -------------------------------------------------------------------------------------------------------


def test_a_config_with_five_mistakes_names_all_five_with_their_lines(runs):
    path = runs.settings("five")
    text = (
        path.read_text()
        .replace("steps: 24", "step: 24\n  steps: many")
        .replace("heads: 2, dropout: 0.1", "heads: 3, dropout: 1.5")
    )
    path.write_text(text.replace("device: cpu", "device: tpu"))
    ended = runs.server.run(str(path))
    message = refused(
        ended, "optim.step", "optim.steps", "many", "model.dropout", "1.5", "device", "tpu", "model.heads"
    )
    assert message.count(f"{path}:") >= 5 and "5 mistakes" in message
    assert not (runs.root / "runs").exists()


def test_a_config_that_is_not_utf_8_is_named_with_its_line(runs):
    path = runs.settings("latin")
    path.write_bytes(path.read_bytes() + "# déjà vu\n".encode("latin-1"))
    refused(runs.server.run(str(path)), "not UTF-8", f"{path}:")


def test_a_config_that_is_not_there_is_named(runs):
    refused(runs.server.run(str(runs.root / "nothing.yaml")), "no such file", "nothing.yaml")


# ---- corpus -------------------------------------------------------------------------------------------------------


def test_a_corpus_that_is_not_there_is_named(runs):
    shutil.rmtree(runs.corpus)
    refused(runs.run("run"), str(runs.corpus), "no such directory")


def respelled(corpus, **splits):
    """Give a corpus another manifest, in which some splits have other shards."""
    manifest = json.loads((corpus / "manifest.json").read_text())
    shards = {name: [Shard(**s) for s in split["shards"]] for name, split in manifest["splits"].items()}
    write_manifest(corpus, shards | splits, Vocab.load(corpus / "vocab"), manifest["tokenizer"], {})


def test_an_empty_corpus_is_named(runs):
    respelled(runs.corpus, train=[])
    refused(runs.run("run"), str(runs.corpus), "train")


def test_a_run_without_validation_and_test_text_says_so_and_how_its_model_is_found(runs):
    respelled(runs.corpus, valid=[], test=[])
    ended = runs.run("run")
    assert ended.code == 0, ended.err
    status = json.loads((runs.directory("run") / "status.json").read_text())
    assert status["reason"] == "all steps done, no report: the corpus has no test split"
    with pytest.raises(UserError, match="not been scored on a validation split") as refusal:
        load_trained(runs.directory("run"))
    assert "--checkpoint latest" in refusal.value.fix
    assert load_trained(runs.directory("run"), "latest").step == 24


def test_a_corpus_shorter_than_one_context_is_named_with_both_lengths(runs):
    refused(runs.run("run", "corpus.context=4096", "optim.batch_tokens=4096", "optim.micro_batch=1"), "2400", "4096")


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_corpus_without_held_out_text_still_trains(runs, split):
    respelled(runs.corpus, **{split: []})
    ended = runs.run("run")
    assert ended.code == 0, ended.err
    assert runs.status("run")[0] == "finished"


def test_a_vocabulary_smaller_than_the_ids_of_the_corpus_is_named(runs):
    lines = (runs.corpus / "vocab").read_text().splitlines(keepends=True)
    (runs.corpus / "vocab").write_text("".join(lines[:-10]))
    refused(runs.run("changed"), str(runs.corpus / "vocab"))
    respelled(runs.corpus)
    refused(runs.run("prepared-like-that"), "the vocabulary has 40 entries", "id 49")


@pytest.mark.parametrize("file", ["manifest.json", "vocab", "codes", "train-00000.bin", "train-00000.idx"])
def test_a_truncated_or_missing_file_of_a_corpus_is_named(runs, file):
    os.truncate(runs.corpus / file, (runs.corpus / file).stat().st_size // 2)
    refused(runs.run("truncated"), file)
    (runs.corpus / file).unlink()
    refused(runs.run("missing"), file)


def test_a_run_goes_on_with_its_corpus_moved_but_not_with_another(runs):
    stopped = runs.run("run", when={"step": 9, "signals": ["SIGTERM"]})
    assert stopped.code == 0
    other = random_corpus(runs.root / "other", seed=1)
    before = runs.checkpoints("run").steps()
    refused(runs.run("run", f"corpus.path={other}"), "another corpus", str(other))
    assert runs.checkpoints("run").steps() == before
    runs.corpus.rename(runs.root / "moved")
    assert runs.run("run", f"corpus.path={runs.root}/moved").code == 0
    assert runs.status("run")[:2] == ("finished", 24)


def prepare(runs, content):
    """Prepare a corpus out of one text file with these bytes."""
    text, settings = runs.root / "news.txt", runs.root / "news.yaml"
    text.write_bytes(content)
    source = f"{{path: {text}, format: text, documents: line}}"
    settings.write_text(f"name: news\noutput: {runs.root}/news\nsources: [{source}]\nsubwords: {{codes: 10}}\n")
    return runs.server.run(str(settings), program="scripts.prepare")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", ["no article"]),
        (b"\n \n\n", ["no article"]),
        (b"One line is fine.\nCaf\xe9 is not.\n", ["news.txt:2", "not UTF-8"]),
    ],
    ids=["empty", "blank", "not UTF-8"],
)
def test_text_that_makes_no_corpus_is_named_and_leaves_none_behind(runs, content, named):
    refused(prepare(runs, content), *named)
    assert not (runs.root / "news").exists()


# ---- run directory ------------------------------------------------------------------------------------------------


def test_a_run_directory_of_another_config_is_refused_by_its_keys(runs):
    assert runs.run("run", "optim.steps=4").code == 0
    before = {path: path.read_bytes() for path in runs.directory("run").rglob("*") if path.is_file()}
    refused(
        runs.run("run", "memory.knn=4", "model.norm=pre"),
        "memory.knn: 3 -> 4",
        "model.norm: post -> pre",
        "config.yaml",
    )
    assert before == {path: path.read_bytes() for path in before}


def test_a_directory_without_permission_is_named(runs):
    directory = runs.directory("run")
    directory.parent.mkdir()
    os.chmod(directory.parent, 0o555)
    refused(runs.run("run", ordinary=True), str(directory), "no permission")
    os.chmod(directory.parent, 0o777)
    assert runs.run("run", "optim.steps=4", ordinary=True).code == 0

    os.chmod(directory / "checkpoints", 0o000)
    refused(runs.run("run", "optim.steps=8", ordinary=True), str(directory / "checkpoints"), "no permission")
    os.chmod(directory / "checkpoints", 0o555)
    refused(runs.run("run", "optim.steps=8", ordinary=True), str(directory / "checkpoints"), "no permission")
    os.chmod(directory / "checkpoints", 0o777)
    assert runs.run("run", "optim.steps=8", ordinary=True).code == 0


# ---- checkpoints --------------------------------------------------------------------------------------------------


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("file", [SHARD, MANIFEST])
@pytest.mark.parametrize("spoil", [flip, truncate, os.unlink], ids=["one flipped bit", "truncated", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(runs, spoil, file):
    assert runs.run("whole").code == 0
    assert runs.run("run", when={"step": 14, "signals": ["SIGTERM"]}).code == 0
    assert runs.checkpoints("run").steps() == [12, 14]
    spoil(runs.checkpoints("run").directory(14) / file)
    ended = runs.run("run")
    assert ended.code == 0, ended.err
    assert "step-0000014 is damaged" in ended.out and file in ended.out and "going on from step 12" in ended.out
    assert runs.outcome("run") == runs.outcome("whole")


def test_a_run_with_only_damaged_checkpoints_does_not_begin_again(runs):
    assert runs.run("run", when={"step": 14, "signals": ["SIGTERM"]}).code == 0
    for step in runs.checkpoints("run").steps():
        flip(runs.checkpoints("run").directory(step) / SHARD)
    metrics = runs.metrics("run")
    refused(runs.run("run"), "none of the 2 checkpoints can be used")
    assert runs.metrics("run") == metrics and runs.checkpoints("run").steps() == [12, 14]


# ---- disks --------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_at_a_save_stops_the_run_and_it_goes_on_when_there_is_room(runs):
    assert runs.run("whole").code == 0
    with small_disk(runs.root / "disk", 2000) as disk:
        filler = disk / "filler"
        started = runs.run("whole", f"runs={disk}", when={"step": 9, "signals": ["SIGTERM"]})
        assert started.code == 0, started.err
        filler.write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 200_000))
        refused(runs.run("whole", f"runs={disk}"), "checkpoint of step 12", "MB free", "goes on from step 9")
        assert json.loads((disk / "whole/status.json").read_text())["state"] == "failed"
        filler.unlink()
        assert runs.run("whole", f"runs={disk}").code == 0
        shutil.copytree(disk / "whole", runs.directory("on-the-small-disk"))
    ours, whole = (runs.outcome(name, other_saves=True) for name in ("on-the-small-disk", "whole"))
    assert ours == whole


def test_a_disk_that_is_full_at_any_write_stops_the_run_with_that_reason_and_nothing_is_lost(runs):
    """No file may grow beyond a limit, which meets another file each time."""
    assert runs.run("whole").code == 0
    largest = sorted(path.stat().st_size for path in runs.directory("whole").rglob("*") if path.is_file())
    for limit in (largest[-1] // 2, largest[-1] - 1, 6000, 3000, 1000):
        ended = runs.run(f"limit-{limit}", file_size=limit)
        refused(ended, "ulimit -f")
        assert runs.run(f"limit-{limit}").code == 0
        assert runs.outcome(f"limit-{limit}") == runs.outcome("whole")
