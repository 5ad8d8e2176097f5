"""Whether bf16 products train as well as fp32: validation curves of several seeds in both precisions, and their spread.

    python benchmarks/precision.py [--corpus prepared/sample] [--steps 600] [--seeds 1 2 3] [--runs runs/precision]

Two models: the quickstart, and one of 6 layers with a memory of 256^2 slots. A run that is there already is not trained again.
What is printed is, for each evaluated step, the mean perplexity of the seeds in each precision and their standard deviation, and
how far the means lie apart in standard deviations of one seed (both precisions' pooled).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODELS = {
    "quickstart": [],
    "6-layers-256x256": ["model.layers=6", "memory.layers=[4]", "memory.sub_keys=256", "model.dropout=0.0"],
}
PRECISIONS = ("fp32", "bf16")
Curve = dict[int, float]


def train(model: str, precision: str, seed: int, arguments: argparse.Namespace) -> Curve:
    """Validation perplexity by step."""
    name = f"{model}-{precision}-{seed}"
    settings = [f"name={name}", f"runs={arguments.runs}", f"precision={precision}", f"seed={seed}", *MODELS[model]]
    settings += [f"corpus.path={arguments.corpus}", f"optim.steps={arguments.steps}", "checkpoint.keep=1"]
    settings += [f"evaluate.every_steps={arguments.every}", f"evaluate.documents={arguments.documents}"]
    settings += [f"evaluate.test_documents={arguments.documents}", f"checkpoint.every_steps={arguments.steps}"]
    command = [sys.executable, str(ROOT / "train.py"), str(ROOT / "configs/quickstart.yaml"), *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (arguments.runs / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {r["step"]: r["perplexity"] for r in records if r["kind"] == "valid"}


def rows(curves: dict[str, list[Curve]]) -> list[str]:
    """The lines of one model's table, from the curves of each precision's seeds."""
    lines = []
    for step in curves["fp32"][0]:
        of = {precision: [curve[step] for curve in curves[precision]] for precision in PRECISIONS}
        means = {precision: statistics.mean(numbers) for precision, numbers in of.items()}
        spread = math.sqrt(statistics.mean(statistics.variance(numbers) for numbers in of.values()))
        apart = means["bf16"] - means["fp32"]
        numbers = " | ".join(f"{means[p]:.1f} ({', '.join(f'{x:.1f}' for x in of[p])})" for p in PRECISIONS)
        lines.append(f"| {step} | {numbers} | {spread:.1f} | {apart:+.1f} | {apart / spread:+.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("prepared/sample"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--documents", default="null", help="documents to evaluate on; null = all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--runs", type=Path, default=Path("runs/precision"))
    arguments = parser.parse_args()
    if len(arguments.seeds) < 2:
        parser.error("--seeds: one seed has no spread")
    for model in arguments.models:
        curves: dict[str, list[Curve]] = {precision: [] for precision in PRECISIONS}
        for seed in arguments.seeds:  # the precisions in turn, so that what is there early can be compared
            for precision in PRECISIONS:
                curves[precision].append(train(model, precision, seed, arguments))
        print(f"\n{model}, {arguments.corpus}, {arguments.steps} steps: validation perplexity, mean (seeds)\n")
        print("| step | fp32 | bf16 | sd of a seed | bf16 - fp32 | in sd |\n|---|---|---|---|---|---|")
        print("\n".join(rows(curves)), flush=True)


if __name__ == "__main__":
    main()
