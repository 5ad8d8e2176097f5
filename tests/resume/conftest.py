import pytest

from tests.resume.runs import Runs
from tests.support.tiny import random_corpus
from tests.support.train_server import Server


@pytest.fixture(scope="session")
def runs(warm: Server, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs to interrupt, and one that was not: `whole`."""
    root = tmp_path_factory.mktemp("resume")
    runs = Runs(warm, root, random_corpus(root / "corpus"))
    ended = runs.run("whole")
    assert ended.code == 0, ended.err
    return runs
