import shutil
from pathlib import Path

import pytest

from tests.resume.runs import Runs
from tests.support.tiny import random_corpus
from tests.support.train_server import Server


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_corpus(tmp_path_factory.mktemp("prepared") / "corpus")


@pytest.fixture
def runs(warm: Server, corpus: Path, tmp_path: Path) -> Runs:
    """Runs of this test alone, on a copy of the corpus that it may spoil."""
    shutil.copytree(corpus, tmp_path / "corpus")
    return Runs(warm, tmp_path, tmp_path / "corpus")
