"""Batches read ahead: the next step's comes from disk, and into pinned memory, while this step is computed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

Batch = tuple[Tensor, ...]
"""Inputs and targets of a rank, and with `model.document_mask` the inputs' documents; int64 (windows, context)."""


class Prefetcher:
    """What `read` gives for each step, in a thread of its own; pinned for a GPU, so that its copy there is asynchronous."""

    def __init__(self, read: Callable[[int], tuple[np.ndarray, ...]], device: torch.device):
        self._read, self._device = read, device
        self._thread = ThreadPoolExecutor(1, "batches")
        self._next: tuple[int, Future[Batch]] | None = None

    def take(self, step: int) -> Batch:
        """The batch of `step`; that of `step + 1` is begun. Raises what `read` raised."""
        found = self._next[1] if self._next and self._next[0] == step else self._thread.submit(self._made, step)
        batch = found.result()
        self._next = step + 1, self._thread.submit(self._made, step + 1)
        return batch

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _made(self, step: int) -> Batch:
        batch = tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in self._read(step))
        if self._device.type != "cuda":
            return batch
        torch.cuda.set_device(self._device)  # a thread begins on GPU 0, whoever's that is
        return tuple(part.pin_memory() for part in batch)
