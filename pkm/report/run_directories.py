"""Run directories as they are now, of runs going on or done: found by name, read without touching them."""

from __future__ import annotations

import difflib
import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pkm.config.load import flatten, load
from pkm.config.schema import Config
from pkm.errors import UserError
from pkm.evaluation.recall import read_facts
from pkm.evaluation.speed import read_speed
from pkm.files import read_json
from pkm.run import metrics
from pkm.run.status import is_interrupted, read_report, read_status

IN_SHORT = ("memory.layers", "memory.count", "memory.sub_keys", "memory.slots")
"""Settings that the short form of a memory, `memory`, includes."""


@dataclass(frozen=True)
class Run:
    """What a run's directory holds now."""

    label: str
    """As much of the end of its path as tells it from the others."""
    directory: Path
    settings: dict[str, str]
    """By dotted key; a section that the run does without is "none"."""
    state: str
    reason: str
    """Why it stopped or failed; empty otherwise."""
    records: list[dict[str, Any]]
    """Of its metrics.jsonl."""
    report: dict[str, Any] | None
    """Its report.json, once it is finished."""
    speed: dict[str, Any] | None
    """Words a second: its speed.json, else its report's."""
    corpus: str | None
    """Fingerprint of what it is trained on; None if that cannot be told."""
    facts: dict[str, Any] | None
    """How it answered when asked for facts: its facts.json, else its report's; None if it was not asked."""

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record.get("kind") == kind]

    @property
    def step(self) -> int:
        return max((record.get("step", 0) for record in self.records), default=0)

    @property
    def best(self) -> dict[str, Any]:
        """The validation record of the lowest loss, of those that measure what the newest does; empty before the first."""
        valid = [record for record in self.of_kind("valid") if record.get("loss") is not None]
        conditions = [tuple(record.get(key) for key in ("documents", "context", "stride")) for record in valid]
        alike = [record for record, under in zip(valid, conditions, strict=True) if under == conditions[-1]]
        return min(alike, key=lambda record: record["loss"], default={})

    @property
    def evaluation(self) -> dict[str, Any]:
        """On the test split; empty before the report."""
        return self.report["evaluation"] if self.report else {}

    def of_memories(self, key: str) -> float | None:
        """A mean over its memories: on test, before the report in the newest validation."""
        newest = (self.of_kind("valid") or [{}])[-1]
        memories = (self.evaluation or newest).get("memories") or {}
        return statistics.fmean(memory[key] for memory in memories.values()) if memories else None


def find(names: Sequence[str], root: Path) -> list[Path]:
    """The run directories that paths, names below `root`, or globs of either stand for; a folder stands for all runs in it.

    UserError for one that means none, with the nearest names there are.
    """
    found: dict[Path, Path] = {}
    for name in names:
        mine = [run for place in (Path(), root) for path in _matching(place, name) for run in _runs_in(path)]
        if not mine:
            known = [str(run.relative_to(root)) for run in _runs_in(root)]
            near = difflib.get_close_matches(name, known, 3, 0.5) or [run for run in known if name in run][:3]
            there = f"{root} holds {', '.join(known[:8])}{' ...' if known[8:] else ''}" if known else "train one first"
            fix = f"did you mean {' or '.join(near)}?" if near else there
            what = f"no run is called {name!r}, here or below {root}"
            if Path(name).expanduser().exists():
                what = f"{name} is there, but no run's directory, and holds none that can be read"
            raise UserError(what, "RUN", fix)
        found |= {run.resolve(): run for run in mine if run.resolve() not in found}
    return list(found.values())


def _matching(place: Path, name: str) -> list[Path]:
    path = place / Path(name).expanduser()
    if path.exists() or not any(c in name for c in "*?["):
        return [path]
    anchor = Path(path.anchor)
    return sorted(anchor.glob(str(path.relative_to(anchor))))


def _runs_in(path: Path) -> list[Path]:
    """The directory itself, if it is a run's; else those below it, in the order of their names. What was exported is no run."""
    found = []
    for folder, below, files in os.walk(path):
        if "config.yaml" in files and not any(name.endswith(".safetensors") for name in files):
            found.append(Path(folder))
        below[:] = [] if "config.yaml" in files else sorted(name for name in below if not name.startswith("."))
    return found


def read(directories: Sequence[Path]) -> list[Run]:
    """Runs as they are now; UserError if a config.yaml cannot be read."""
    labels = [path.resolve().parts for path in directories]
    parts = 1
    while len({label[-parts:] for label in labels}) < len(labels):
        parts += 1
    return [read_run(path, "/".join(label[-parts:])) for path, label in zip(directories, labels, strict=True)]


def read_run(directory: Path, label: str) -> Run:
    status = read_status(directory)
    state = "interrupted" if is_interrupted(status) else status.get("state", "not begun")
    reason = " ".join(str(status.get("reason") or "").split()) if state in ("stopped", "failed") else ""
    report = read_report(directory) if state == "finished" else None
    settings, records = read_settings(directory / "config.yaml"), list(metrics.read(directory / metrics.FILE))
    speed = read_speed(directory) or (report or {}).get("speed")
    return Run(
        label, directory, settings, state, reason, records, report, speed, _corpus(directory), read_facts(directory)
    )


def read_settings(file: Path) -> dict[str, str]:
    """Every setting, with today's defaults for those that the file lacks; as the file has them, if today's schema refuses it."""
    try:
        tree = load(file, (), Config, say=lambda line: None).config.model_dump(mode="json")
    except UserError:
        try:
            tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError):
            tree = None
        if not isinstance(tree, dict):
            raise
    assert tree is not None
    memory = tree.get("memory")
    memories = [memory] if isinstance(memory, dict) else memory if isinstance(memory, list) else []
    short = {"memory": " + ".join(map(_in_short, memories))} if memories else {}
    flat = {key: _shown(value) for key, value in flatten(tree).items() if key not in ("name", "runs")}
    return {**flat, **short}


def differing(runs: Sequence[Run]) -> list[str]:
    """The settings, by dotted key, that are not the same in all runs that have them."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    everywhere = all(run.settings.get("memory", "none") != "none" for run in runs)
    in_short = [key for key in keys if re.sub(r"^memory\.\d+\.", "memory.", key) in IN_SHORT]
    for key in ("memory",) if everywhere else in_short:
        keys.pop(key, None)
    return [key for key in keys if len({run.settings[key] for run in runs if key in run.settings}) > 1]


def _shown(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _in_short(memory: Mapping[str, Any]) -> str:
    side = memory.get("sub_keys")
    slots = f"{side}^2" if side else f"{memory.get('slots'):,} flat" if memory.get("slots") else "?"
    where = memory.get("layers")
    return f"{slots} at {', '.join(map(str, where))}" if where else f"{slots} x {memory.get('count')}"


def _corpus(directory: Path) -> str | None:
    """Fingerprint of the run's corpus: from the newest checkpoint, else from the corpus itself; None if both are missing."""
    manifests = sorted(directory.glob("checkpoints/step-*/manifest.json"), reverse=True)
    for manifest in manifests:
        fingerprint = ((read_json(manifest) or {}).get("record") or {}).get("corpus")
        if isinstance(fingerprint, str):
            return fingerprint
    try:
        path = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))["corpus"]["path"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None
    return (read_json(Path(path) / "manifest.json") or {}).get("fingerprint")
