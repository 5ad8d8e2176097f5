"""Saving while training goes on: a thread that keeps its error until `wait`, and copies of tensors for it to read."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor


class Background:
    """`work` in a thread, begun at once. The process does not stay alive for it."""

    def __init__(self, work: Callable[[], object]):
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        return not self._thread.is_alive()

    def failed(self) -> bool:
        return self.done() and self._error is not None

    def wait(self) -> None:
        """Until the work is done; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class Copies:
    """Copies tensors into CPU buffers that are reused; they are pinned where the tensors are on a GPU."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors as they are now, in the buffers of the call before: its results are overwritten."""
        for name, tensor in tensors.items():
            kept = self._kept.get(name)
            if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
                kept = self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            kept.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        return {name: self._kept[name] for name in tensors}
