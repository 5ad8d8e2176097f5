"""What tests of kernels share: the device that they run on, and how near is near."""

import torch

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def on_gpu(*cases: tuple) -> list[tuple]:  # type: ignore[type-arg]
    """Cases that an interpreter would take minutes for."""
    return list(cases) if GPU else []


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    """Relative error in the Euclidean norm; NaN never passes."""
    assert ours.shape == theirs.shape
    assert (ours.float() - theirs.float()).norm() <= tolerance * theirs.float().norm() + 1e-12
