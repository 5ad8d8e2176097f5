"""Which code is running."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import torch

import pkm


@cache
def code_version() -> dict[str, str | None]:
    """Versions of pkm and torch, and the commit of pkm's checkout if it is one."""
    root = Path(pkm.__file__).parent.parent
    try:
        git = ["git", "--no-optional-locks", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"]
        top, head = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.split()
        commit = head if Path(top).samefile(root) else None
    except (OSError, subprocess.SubprocessError, ValueError):
        commit = None
    return {"pkm": pkm.__version__, "commit": commit, "torch": str(torch.__version__)}
