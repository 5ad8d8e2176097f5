"""One table of what was measured on an H100 and what was aimed at; the last thing that scripts/gpu_check.sh prints.

    python benchmarks/targets.py FOLDER      with cases.xml, memory.json and model.json in it

N = 16,384 tokens, d = 1024, H = 4, k = 32, query 512, bf16; exit status 1 if a check failed or is missing.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

SMALL, LARGE = 512**2, 1024**2
STEP = "forward + backward + update"
# slots, row of the layer's benchmark, most milliseconds
LAYER = [
    (SMALL, "ours, fused, bf16 state: forward", 1.2),
    (LARGE, "ours, fused, bf16 state: forward", 1.7),
    (SMALL, f"ours, fused, fp32 state: {STEP}", 5.0),
    (LARGE, f"ours, fused, fp32 state: {STEP}", 8.0),
    (SMALL, f"ours, fused, bf16 state: {STEP}", 4.0),
    (LARGE, f"ours, fused, bf16 state: {STEP}", 6.0),
    (SMALL, f"ours, sparse, fp32 state: {STEP}", 6.0),
    (LARGE, f"ours, sparse, fp32 state: {STEP}", 9.6),
    (SMALL, f"ours, sparse, bf16 state: {STEP}", 4.8),
    (LARGE, f"ours, sparse, bf16 state: {STEP}", 7.2),
]
# model, what, compared with, at least
MODEL = [
    ("12 layers, one memory of 512^2", "training", "12 layers, dense", 0.95),
    ("12 layers, one memory of 512^2", "inference", "24 layers, dense", 1.6),
]
# model, least share of the rate of a large matrix product in training
MFU = [("12 layers, dense", 0.45)]


def load(path: Path) -> dict | None:  # type: ignore[type-arg]
    return json.loads(path.read_text()) if path.exists() else None


def cases(path: Path, log: Path) -> tuple[str, bool]:
    """(what the tests of the kernels said, whether all of them passed); `log` says so where they could not be finished."""
    if not path.exists():
        return "not finished", False
    suites = list(ET.parse(path).getroot().iter("testsuite"))
    count = {key: sum(int(s.get(key, 0)) for s in suites) for key in ("tests", "failures", "errors", "skipped")}
    bad = count["failures"] + count["errors"]
    said = f"{count['tests'] - bad - count['skipped']} passed, {bad} failed, {count['skipped']} skipped"
    broken = log.exists() and "FAILED, exit code" in log.read_text()
    return said + (", not all run or passed" if broken else ""), bad == 0 and not broken


def main(folder: Path) -> int:
    said, right = cases(folder / "cases.xml", folder / "cases.log")
    memory, model = load(folder / "memory.json"), load(folder / "model.json")
    lines = [f"| kernels against reference and float64 | {said} | all pass | {'yes' if right else 'NO'} |"]
    measured = {(r["slots"], r["what"]): r["ms"] for r in memory["rows"]} if memory else {}
    for slots, what, most in LAYER:
        ms = measured.get((slots, what))
        side = round(slots**0.5)
        lines.append(
            f"| {side}^2 slots, {what} | missing | <= {most} ms | NO |"
            if ms is None
            else f"| {side}^2 slots, {what} | {ms:.2f} ms | <= {most} ms | {'yes' if ms <= most else 'NO'} |"
        )
    speeds = {r["model"]: r for r in model["rows"]} if model else {}
    for name, what, base, least in MODEL:
        if name not in speeds or base not in speeds:
            lines.append(f"| {name}, {what} | missing | >= {least} x {base} | NO |")
            continue
        ratio = speeds[name][what] / speeds[base][what]
        lines.append(f"| {name}, {what} | {ratio:.3f} x {base} | >= {least} | {'yes' if ratio >= least else 'NO'} |")
    for name, least in MFU:
        mfu = speeds.get(name, {}).get("training_mfu")
        found = "missing" if mfu is None else f"{100 * mfu:.0f} %"
        met = "yes" if mfu is not None and mfu >= least else "NO"
        lines.append(f"| {name}, training, MFU | {found} | >= {100 * least:.0f} % | {met} |")
    print((memory or model or {"facts": {"machine": "nothing was measured"}})["facts"]["machine"])
    print("\n| check | measured | aim | met |\n|---|---|---|---|")
    print("\n".join(lines))
    return 0 if right and memory and model else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
