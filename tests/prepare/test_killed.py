"""A preparation that is killed, wherever it is, goes on where it was and ends with the same bytes."""

from __future__ import annotations

import gzip
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from tests.prepare.conftest import content, made_articles, write_jsonl

ROOT = Path(__file__).parents[2]
KILLED_AT = ROOT / "tests/support/killed_at"
# The shipped program, with pieces and shards so small that there is much to be killed in the middle of.
PROGRAM = f"""
import os, runpy, sys, threading
from pkm.prepare import pipeline
from pkm.prepare.input import sources
sources.SMALLEST_PIECE = sources.LARGEST_PIECE = 8000
pipeline.SMALLEST_SHARD = pipeline.LARGEST_SHARD = 16000
if "HOLD" in os.environ:  # once it has said so, the program waits to be interrupted
    write = sys.stdout.write

    def hold(text):
        write(text)
        if text.startswith(os.environ["HOLD"]):
            sys.stdout.flush()
            threading.Event().wait(300)
        return len(text)

    sys.stdout.write = hold
sys.argv = ["prepare.py", *sys.argv[1:]]
runpy.run_path({str(ROOT / "scripts" / "prepare.py")!r}, run_name="__main__")
"""
CONFIG = """
name: NAME
sources: [{path: [plain.jsonl, packed.jsonl.gz]}]
held_out: {valid: 6, test: 6}
filters: {language: null}
subwords: {codes: 100}
workers: 2
"""


def start(directory: Path, name: str, stdout: int | None = None, **variables: str) -> subprocess.Popen:
    (directory / f"{name}.yaml").write_text(CONFIG.replace("NAME", name))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", PROGRAM, f"{name}.yaml"]
    with open(directory / f"{name}.log", "a") as log:
        return subprocess.Popen(
            command, cwd=directory, env=environment, stdout=stdout or log, stderr=log, text=True, start_new_session=True
        )


def test_a_preparation_killed_at_random_moments_goes_on_and_ends_identical(tmp_path: Path):
    write_jsonl(tmp_path / "plain.jsonl", made_articles(200))
    packed = write_jsonl(tmp_path / "packed.jsonl", made_articles(200, seed=1) + made_articles(20)).read_bytes()
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(packed))
    changes = tmp_path / "changes"
    counted = {"PYTHONPATH": f"{KILLED_AT}{os.pathsep}{ROOT}", "CHANGES": str(changes)}
    assert start(tmp_path, "whole", CHANGES_BELOW=str(tmp_path / "prepared"), **counted).wait() == 0, (
        tmp_path / "whole.log"
    ).read_text()
    in_all, rng, kills = changes.stat().st_size, random.Random(20190712), 0
    while True:
        changes.unlink()
        # All processes at once, or the first alone: its workers are then left behind and have to notice.
        first_alone = {"KILL_ONLY_FIRST": "1"} if kills % 2 else {}
        at = str(rng.randint(1, in_all // 3))
        process = start(
            tmp_path, "killed", CHANGES_BELOW=str(tmp_path / "prepared"), KILL_AT=at, **counted, **first_alone
        )
        if process.wait() == 0:
            break
        assert process.returncode == -signal.SIGKILL, (tmp_path / "killed.log").read_text()
        kills += 1
    assert kills >= 5
    whole, killed = content(tmp_path / "prepared/whole"), content(tmp_path / "prepared/killed")
    killed["manifest.json"] = killed["manifest.json"].replace(b'"killed"', b'"whole"')
    assert killed == whole
    assert not (tmp_path / "prepared/killed.preparing").exists()


def test_ctrl_c_ends_with_a_word_and_the_next_call_finishes(tmp_path: Path):
    write_jsonl(tmp_path / "plain.jsonl", made_articles(200))
    write_jsonl(tmp_path / "packed.jsonl.gz", made_articles(50, seed=1))
    process = start(tmp_path, "stopped", subprocess.PIPE, HOLD="reading and filtering")
    log = tmp_path / "stopped.log"
    assert process.stdout
    next(line for line in process.stdout if line.startswith("reading and filtering"))
    os.kill(process.pid, signal.SIGINT)
    process.stdout.read()
    assert process.wait() == 130, log.read_text()
    assert log.read_text() == "interrupted\n"
    assert start(tmp_path, "stopped").wait() == 0, log.read_text()
