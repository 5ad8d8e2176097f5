"""Which settings may differ when a run is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pkm.config.load import flatten, load
from pkm.config.schema import Config
from pkm.errors import UserError


def refuse_changes(path: Path, config: Config) -> list[str]:
    """The settings of `config` that differ from those of the file, as "key: old -> new", if all of them may.

    UserError with every key that may not.
    """
    old, new = (flatten(one.model_dump(mode="json")) for one in (load(path, (), Config).config, config))
    changed, refused = [], []
    for key in {**old, **new}:
        before, now = old.get(key), new.get(key)
        if before != now:
            shown = ("null" if value is None else str(value) for value in (before, now))
            line, why = f"{key}: {' -> '.join(shown)}", _why_not(key, before, now, config)
            changed.append(line)
            if why is not None:
                refused.append(line + why)
    if refused:
        what = "\n    ".join(["this run began with other settings", *refused])
        raise UserError(what, str(path), "give the old values again, or start another run with name=...")
    return changed


def _why_not(key: str, before: Any, now: Any, config: Config) -> str | None:
    """Why a setting may not change ("" if there is nothing to explain), or None if it may."""
    if any(key == free or key.startswith(free + ".") for free in MAY_CHANGE):
        return None
    if key == "precision" and "auto" in (before, now):
        return None  # what it was is in the checkpoints, which are not loaded in another
    if key == "optim.values.dtype" and "auto" in (before, now):
        return None  # likewise: a checkpoint fits no other
    if key != "optim.steps":
        return ""
    if now < before:
        return " (may only grow)"
    groups = ["dense", "embeddings", *(["addressing", "values"] if config.memory else [])]
    groups += ["matrices"] if config.optim.matrices else []
    schedules = [config.optim.group(name).schedule for name in groups]
    closed = [schedule for schedule in schedules if schedule not in OPEN_ENDED]
    return f" (learning rates of a {closed[0]} schedule depend on it)" if closed else None


# Settings that may change when a run is resumed, because they do not change the result of any step.
MAY_CHANGE = (
    "name", "runs", "corpus.path", "device", "threads", "max_minutes", "profile", "parallel.values", "checkpoint",
    "evaluate", "log",
)  # fmt: skip
# Schedules whose learning rate at a step does not depend on optim.steps: a run with them may be made longer.
OPEN_ENDED = ("inverse_sqrt", "constant")
