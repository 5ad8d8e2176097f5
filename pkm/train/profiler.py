"""A window of steps under torch's profiler, as a trace file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pkm.config.schema import ProfileConfig
from pkm.distributed import dist


@contextmanager
def profiled(settings: ProfileConfig | None, step: int, directory: Path) -> Iterator[None]:
    """Record what happens within it if `step` is one of `settings`; each rank writes profile-STEP-rankR.json."""
    if settings is None or not settings.from_step <= step < settings.from_step + settings.steps:
        yield
        return
    with torch.profiler.profile(record_shapes=True, profile_memory=True) as profile:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(directory / f"profile-{step:07d}-rank{dist.rank()}.json"))
