"""Run something in a forked child: to have it killed, or to have it run without root's powers."""

from __future__ import annotations

import ctypes
import os
import pickle
import struct
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch

T = TypeVar("T")


def exit_code_of(action: Callable[[], object]) -> int:
    """Run `action` in a child: 0 if it returned, 1 if it raised (traceback on stderr), -N if signal N killed it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def error_of(action: Callable[[], object], kind: type[Exception], before: Callable[[], object] = lambda: None) -> str:
    """The message of the `kind` that `action` raises in a child in which `before` ran; "" if it raises none."""
    with tempfile.TemporaryFile() as file:

        def run() -> None:
            before()
            try:
                action()
            except kind as error:
                os.pwrite(file.fileno(), str(error).encode(), 0)

        assert exit_code_of(run) == 0
        return file.read().decode()


def on_ranks(size: int, action: Callable[[int], T]) -> list[T]:
    """What `action(rank)` returns on each of that many processes, which are joined by gloo; anything that pickles."""
    with tempfile.TemporaryDirectory() as scratch:

        def rank(number: int) -> None:
            address = f"file://{scratch}/rendezvous"
            torch.distributed.init_process_group("gloo", init_method=address, rank=number, world_size=size)
            Path(scratch, str(number)).write_bytes(pickle.dumps(action(number)))
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()

        context = torch.multiprocessing.get_context("fork")
        processes = [context.Process(target=rank, args=(number,)) for number in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * size
        return [pickle.loads(Path(scratch, str(number)).read_bytes()) for number in range(size)]


def without_root() -> None:
    """Give up root's right to ignore permissions, for good: root is then an owner like any other."""
    if os.geteuid() == 0:
        header = struct.pack("Ii", 0x20080522, 0)
        none = struct.pack("6I", *[0] * 6)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.capset(header, none) != 0:
            raise OSError(ctypes.get_errno(), "capset")


@contextmanager
def small_disk(path: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of that size at `path`; skips the test where none can be mounted."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small disk needs root: {error}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
