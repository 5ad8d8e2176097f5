"""Which checkpoints are kept: their names, the pointers `latest` and `best`, and when an old one is removed.

Of several ranks, rank 0 calls what writes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pkm import files
from pkm.checkpoint import kill_points, manifest, verify
from pkm.checkpoint.manifest import Damaged, Manifest
from pkm.distributed import dist
from pkm.errors import UserError

_NAME = re.compile(r"step-(\d{7,})")


class Retention:
    """The checkpoints below `root`, of which the newest `keep` stay, and the best one besides.

    refuse_if_taken_over    raises UserError once the directory is another process's: called before anything is written
    """

    def __init__(self, root: Path, keep: int, refuse_if_taken_over: Callable[[], None] = lambda: None):
        self.root, self.keep, self.refuse_if_taken_over = root, keep, refuse_if_taken_over
        self._seen_intact: dict[int, tuple[Any, ...]] = {}
        """What `_state` said of the checkpoints that were found intact."""

    def steps(self) -> list[int]:
        """Steps of the checkpoints there are, damaged or not, oldest first. UserError if they cannot be listed."""
        try:
            names = [entry.name for entry in self.root.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise files.refusal(error, self.root) from error
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def directory(self, step: int) -> Path:
        return self.root / f"step-{step:07d}"

    def retain(self, saved: int) -> None:
        """Remove what is older than the `keep` newest intact checkpoints; the best and the one just saved stay."""
        self.refuse_if_taken_over()
        best, steps = self.best(), self.steps()
        if any(step not in (saved, best) for step in steps[: -self.keep]):
            intact = [step for step in reversed(steps) if self.intact(step)][: self.keep]
            for step in steps:
                if step < min(intact) and step not in (saved, best):
                    doomed = self.directory(step)
                    doomed.rename(doomed.with_name(doomed.name + ".removed"))  # at once; its files take a while
                    kill_points.point("checkpoint:in-retention")
        self.sweep()
        for replaced in self.root.glob("step-*.damaged"):
            shutil.rmtree(replaced, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what killed saves left: half-written checkpoints, and old ones that were on their way out."""
        self.refuse_if_taken_over()
        for leftover in (*self.root.glob("step-*.tmp"), *self.root.glob("step-*.removed")):
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.root.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)

    def intact(self, step: int) -> bool:
        """Whether a checkpoint verifies; files that did not change since they were found intact are not hashed again."""
        try:
            state = _state(self.directory(step))
            if self._seen_intact.get(step) != state:
                verify.verify(self.directory(step))
                self._seen_intact[step] = state
        except (OSError, Damaged, UserError):
            return False
        return True

    def verify_together(self, directory: Path, group: dist.Group = None) -> Manifest | str:
        """`verify.verify_together`, and rank 0 remembers that a checkpoint of this run is intact."""
        state = None
        if dist.is_main():
            with suppress(OSError):
                state = _state(directory)
        found = verify.verify_together(directory, group)
        if state is not None and directory.parent == self.root and not isinstance(found, str):
            self._seen_intact[int(found["step"])] = state
        return found

    def point(self, latest: int, best: int | None) -> None:
        """Write the pointers."""
        self.refuse_if_taken_over()
        for name, step in (("latest", latest), ("best", best)):
            if step is None:
                (self.root / name).unlink(missing_ok=True)
            else:
                files.atomic_write(self.root / name, self.directory(step).name + "\n")

    def best(self) -> int | None:
        """Step of the best checkpoint, by the pointer; by the manifests if there is none that can be used."""
        try:
            match = _NAME.fullmatch((self.root / "best").read_text().strip())
        except (OSError, ValueError):
            match = None
        if match and self.directory(int(match[1])).is_dir():
            return int(match[1])
        marked = (step for step in reversed(self.steps()) if manifest.says_best(self.directory(step)))
        return next(filter(self.intact, marked), None)

    def repair_pointers(self, latest: int) -> None:
        """Make the pointers what they were when the checkpoint of step `latest` was the newest.

        A save may have been killed between its rename and its pointers, and later checkpoints may be damaged.
        """
        pointed = self.best()
        best = [step for step in self.steps() if step == pointed or manifest.says_best(self.directory(step))]
        self.point(latest, max((step for step in best if step <= latest), default=None))


def _state(directory: Path) -> tuple[Any, ...]:
    """What changes when a file does."""
    return tuple(sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in directory.iterdir()))
