import gc
import os
import signal
import sys
from pathlib import Path

# What a CI system, a launcher or a terminal may have set changes what programs do and print.
for name in list(os.environ):
    if name.startswith(("SLURM_", "TORCHELASTIC_", "PKM_")) or name in (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR",
        "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES",
    ):  # fmt: skip
        del os.environ[name]
os.environ["TERM"] = "xterm"
# Nothing is downloaded, and nothing sent.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"}
# What a shell starts in the background ignores Ctrl-C, and so does everything that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest
import torch

from tests.support import fake_slurm
from tests.support.tiny import random_corpus, tiny_config
from tests.support.train_server import Server
from tests.support.whole_runs import trained

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


SLOW = (
    "checkpoint/test_verify.py", "distributed/", "doctor/test_ranks.py", "evaluation/test_harness.py", "experiments/test_reproduce.py",
    "experiments/test_size.py", "faults/", "inference/test_hugging_face.py", "inference/test_imported.py", "memory/test_triton.py",
    "prepare/input/test_ids.py", "prepare/test_executor.py", "prepare/test_killed.py", "prepare/test_mixture.py", "prepare/test_near.py",
    "prepare/test_pipeline.py", "report/test_browser.py", "report/test_single.py", "resume/", "slurm/", "test_examples.py",
    "text/test_all_golden_files.py", "train/test_no_wait.py", "train/test_parallel.py",
)  # fmt: skip
SLOW_WORDS = ("ranks", "resume", "compile")
"""In the names of slow tests elsewhere: of processes of their own, runs made twice, code that a compiler makes."""

# Single tests of a minute, in Triton's interpreter or on a real SLURM: were they not begun first, the others would wait for them at the end.
LONG = ("memory/test_triton.py", "memory/test_triton_compiles.py", "train/test_no_wait.py", "slurm/real/")


def pytest_collection_modifyitems(items):
    """Marks what `make test-fast` leaves out, and puts the longest tests first."""

    def stands_in(item, places):
        return item.path.relative_to(Path(__file__).parent).as_posix().startswith(places)

    for item in items:
        if stands_in(item, SLOW) or any(word in item.name for word in SLOW_WORDS):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not stands_in(item, LONG))


def pytest_collection_finish():
    """What was imported and collected lives to the end: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_corpus_path(tmp_path_factory):
    return random_corpus(tmp_path_factory.mktemp("prepared") / "tiny")


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """The one server that all tests have their real runs from."""
    server = Server(tmp_path_factory.mktemp("jobs"))
    yield server
    server.close()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Results of a test must not depend on the machine's cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_compiled():
    """What other tests compiled counts towards the limit of recompilations."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def cluster(tmp_path):
    return fake_slurm.built(tmp_path)


@pytest.fixture
def train(tiny_corpus_path, tmp_path):
    """Runs a config as train.py does; returns (model, optimizers, state, run directory)."""

    def go(**sections):
        sections["corpus"] = {"path": str(tiny_corpus_path), **sections.get("corpus", {})}
        config = tiny_config(runs=str(tmp_path / "runs"), **sections)
        return *trained(config), config.directory

    return go
