"""What this machine is and has, which processes live on it, and which code runs here."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pkm

if TYPE_CHECKING:
    import torch


@cache
def code_version() -> dict[str, str | None]:
    """Versions of pkm and torch, and the commit of pkm's checkout if it is one."""
    import torch

    root = Path(pkm.__file__).parent.parent
    try:
        git = ["git", "--no-optional-locks", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"]
        top, head = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.split()
        commit = head if Path(top).samefile(root) else None
    except (OSError, subprocess.SubprocessError, ValueError):
        commit = None
    return {"pkm": pkm.__version__, "commit": commit, "torch": str(torch.__version__)}


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on the GPU, or that the process held on the CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def machine() -> str:
    """Its platform and the versions that matter to a measurement."""
    import torch

    return f"{platform.platform()}, Python {platform.python_version()}, torch {torch.__version__}"


def processor() -> str:
    """The model of this machine's CPU."""
    return cpu_info("model name") or platform.processor() or platform.machine()


@cache
def cpu_info(name: str) -> str:
    """What Linux says of the first CPU by a name of /proc/cpuinfo, such as `model name` or `flags`; empty without it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


def cpu_has_bf16() -> bool:
    """Whether the processor multiplies matrices of bf16 itself (AVX512_BF16 or AMX), several times as fast as those of fp32.

    Without it torch can do so too, but slower than in fp32. Known for x86 on Linux; False elsewhere.
    """
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(cpu_info("flags").split())


# Parameters of glibc's mallopt and what they are set to; the first is the largest that glibc takes.
MALLOC = {"M_MMAP_THRESHOLD": (-3, 1 << 25), "M_TRIM_THRESHOLD": (-1, -1), "M_TOP_PAD": (-2, 1 << 26)}


def keep_freed_memory() -> None:
    """Let malloc keep what is freed: every step asks for the same tensors again, and pages of the system come zeroed, one
    fault each (some 8,000 a step of the quickstart).

    On glibc alone, and not where the user has tuned malloc. The process then holds what it once needed at most.
    """
    tuned = any(name.startswith(("GLIBC_TUNABLES", "MALLOC_")) for name in os.environ)
    if platform.libc_ver()[0] == "glibc" and not tuned:
        for parameter, value in MALLOC.values():
            ctypes.CDLL(None).mallopt(parameter, value)


def card() -> str | None:
    """The name of the first GPU, from nvidia-smi: asking torch would create a CUDA context on a GPU that runs are using."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        import torch

        return torch.cuda.get_device_name()
    return asked.stdout.splitlines()[0].strip() if asked.returncode == 0 and asked.stdout.strip() else None


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """The GPUs that torch would see, as CUDA_VISIBLE_DEVICES names them; creates no CUDA context."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if len(named) >= count else [str(number) for number in range(count)]


def lives(pid: int) -> bool:
    """Whether a process with this id exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def cpu_seconds() -> float:
    """CPU time of this process and of those it has waited for."""
    return sum(os.times()[:4])


def peak_kilobytes() -> int:
    """The most memory this process, or one it has waited for, ever held."""
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return peak // 1024 if sys.platform == "darwin" else peak
