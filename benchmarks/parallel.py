"""Training on one and on several processes: tokens per second and the bytes that travel, values replicated and sharded.

    python benchmarks/parallel.py [--ranks 1 2] [--json FILE] [key=value ...]

Runs itself under torchrun, once for each number of ranks and each way to keep the values, with one thread a rank. Every
step does the same global batch, so that two ranks have half of it each. Bytes are counted where they are handed to
torch.distributed and turned into what a rank sends, as pkm.model.cost.Traffic says; beside them stands what the dry run expects.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as td

from pkm.config.load import load
from pkm.config.schema import Config
from pkm.device import Compute
from pkm.distributed import dist
from pkm.distributed.torchrun import ONE_NODE
from pkm.files import json_text
from pkm.model.cost import traffic
from pkm.model.transformer import build_model
from pkm.train.optim import build_optimizers
from pkm.train.parallel import apply_parallelism, distribute
from pkm.train.step import backward

VOCABULARY = 8_000
CONFIG = """
name: parallel
corpus: {path: none, context: 128}
model: {layers: 4, dim: 256, heads: 4}
memory: {layers: [3], sub_keys: 128, heads: 4, knn: 16, query: {dim: 128}}
optim: {steps: 1000, batch_tokens: 4096}
precision: fp32
device: cpu
"""
Sent = Counter[str]


@contextmanager
def counted(sent: Sent) -> Iterator[None]:
    """Add up what this rank hands to torch.distributed, as the bytes that it sends, by kind of collective."""
    others = dist.world_size() - 1
    reduce, gather, exchange = td.all_reduce, td.all_gather, td.all_to_all_single

    def count_reduce(tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
        sent["sums"] += 2 * tensor.nbytes * others // (others + 1)
        return reduce(tensor, *rest, **options)

    def count_gather(parts: list[torch.Tensor], tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
        sent["gathers"] += tensor.nbytes * others
        return gather(parts, tensor, *rest, **options)

    def count_exchange(received: torch.Tensor, tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
        sent["exchanges"] += tensor.nbytes * others // (others + 1)
        return exchange(received, tensor, *rest, **options)

    td.all_reduce, td.all_gather, td.all_to_all_single = count_reduce, count_gather, count_exchange
    try:
        yield
    finally:
        td.all_reduce, td.all_gather, td.all_to_all_single = reduce, gather, exchange


def measure(config: Config, steps: int) -> dict[str, Any]:
    """Seconds of an update, the processors' time that all ranks spend in one, and the bytes that this rank sends in one."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = apply_parallelism(build_model(config, VOCABULARY), config)
    optim = build_optimizers(config.optim, model)
    compute = Compute(torch.device("cpu"), "fp32")
    module, rows = distribute(model), slice(*dist.share(config.sequences))
    words = np.random.default_rng(1).zipf(1.3, (steps + 2, config.sequences, config.corpus.context + 1)) % VOCABULARY
    seconds, sent, worked = [], Counter[str](), 0.0
    for step, batch in enumerate(words, 1):
        counting = counted(sent) if step == len(words) else counted(Counter())
        worked = time.process_time() if step <= 3 else worked
        started = time.perf_counter()
        with counting:
            optim.clear()
            own = torch.from_numpy(batch[rows])
            backward(config, compute, module, model, (own[:, :-1], own[:, 1:]), 1.0, measures=False)
            optim.sum_over_ranks()
            optim.step(step, optim.gradient_norms())
        seconds.append(time.perf_counter() - started)
    second = statistics.median(seconds[2:])
    work = dist.all_reduce(torch.tensor(time.process_time() - worked, dtype=torch.float64)).item() / (len(words) - 2)
    expected = traffic(config, VOCABULARY, dist.world_size())
    return {
        "ranks": dist.world_size(),
        "values": config.parallel.values,
        "seconds": second,
        "tokens_per_second": config.optim.batch_tokens / second,
        "fastest_tokens_per_second": config.optim.batch_tokens / min(seconds[2:]),
        "processor_seconds": work,
        "sent": dict(sent),
        "sent_bytes": sum(sent.values()),
        "expected_bytes": expected.total,
    }


def on_ranks(ranks: int, overrides: list[str], steps: int) -> dict[str, Any]:
    """What rank 0 of that many measured."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "measured.json"
        command = [sys.executable, "-m", "torch.distributed.run", *ONE_NODE, f"--nproc-per-node={ranks}", __file__]
        command += ["--worker", str(out), "--steps", str(steps), *overrides]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def work(out: Path, overrides: list[str], steps: int) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(CONFIG)
        file.flush()
        config = load(file.name, overrides, Config).config
    dist.start(torch.device("cpu"))
    found = measure(config, steps)
    if dist.is_main():
        out.write_text(json.dumps(found))
    dist.stop()


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | values | tokens/s | in the fastest step | processor s a step, all ranks | MB sent by a rank | expected |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        speed = f"{row['tokens_per_second']:,.0f} | {row['fastest_tokens_per_second']:,.0f}"
        sizes = f"{row['sent_bytes'] / 1e6:.2f} | {row['expected_bytes'] / 1e6:.2f}"
        lines.append(f"| {row['ranks']} | {row['values']} | {speed} | {row['processor_seconds']:.2f} | {sizes} |")
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    machine = f"{platform.platform()}, torch {torch.__version__}, gloo, one thread a rank; {load} at the end"
    return "\n".join([*lines, "", machine, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of processes to try")
    parser.add_argument("--steps", type=int, default=20, help="updates to time, after two that are not")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over this program's own")
    args = parser.parse_intermixed_args()
    if args.worker:
        return work(args.worker, args.overrides, args.steps)
    rows = [
        on_ranks(ranks, [*args.overrides, f"parallel.values={values}"], args.steps)
        for ranks in args.ranks
        for values in (("replicated", "sharded") if ranks > 1 else ("replicated",))
    ]
    if args.json:
        args.json.write_text(json_text(rows, indent=1))
    print(markdown(rows))


if __name__ == "__main__":
    main()
