import tempfile
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
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, RealCluster(Path(folder)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def runs(slurm: RealCluster, warm: Server, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("runs")
    return Runs(warm, root, random_corpus(root / "corpus"))
