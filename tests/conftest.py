import pytest
import torch

from tests.tiny import random_corpus


@pytest.fixture(scope="session")
def tiny_corpus_path(tmp_path_factory):
    return random_corpus(tmp_path_factory.mktemp("prepared") / "tiny")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Results of a test must not depend on the machine's cores."""
    torch.set_num_threads(1)
