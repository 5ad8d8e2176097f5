import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.resume.runs import Runs
from tests.slurm.real.cluster import RealCluster, missing
from tests.support.tiny import random_corpus
from tests.support.train_server import Server


@pytest.fixture(scope="session")
def slurm():
    if (reason := missing()) is not None:
        pytest.skip(reason)
    # A short name: munge's socket is in it, and those have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, ExitStack() as running:
        try:
            cluster = running.enter_context(RealCluster(Path(folder)))
        except AssertionError as error:  # a machine that its daemons cannot run on, such as some containers
            pytest.skip(f"SLURM is installed but does not start here: {error}")
        yield cluster


@pytest.fixture(scope="session")
def runs(slurm: RealCluster, warm: Server, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("runs")
    return Runs(warm, root, random_corpus(root / "corpus"))
