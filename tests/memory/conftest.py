import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers on every run."""
    torch.manual_seed(20190712)
