"""Tokens per second of whole language models, with and without a memory, in training and inference on a GPU.

    python benchmarks/model.py [--json FILE] [--tokens N] [--precision bf16|fp16] [--compile]

Width 1024, 16 heads, context 256, 60,000 subwords. Rows: 12 layers dense; 12 layers with one memory of 512^2 slots, and of
1024^2, in place of a feed-forward network (values and their moments in bf16); 24 layers dense. Training is forward, backward, gradient
norms and both optimizers' updates, as in train.py; inference is the loss without gradients. MFU is `pkm.model.cost`'s FLOPs a token
over the rate of a large matrix product, as measured now. Tokens are clustered as words are: their ids follow Zipf's law.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pkm.config.schema import Config
from pkm.device import Compute
from pkm.files import json_text
from pkm.model.cost import flops
from pkm.model.transformer import build_model
from pkm.train.optim import build_optimizers
from pkm.train.parallel import apply_parallelism

VOCABULARY, CONTEXT = 60_014, 256
MODELS: dict[str, dict[str, Any]] = {
    "12 layers, dense": {"layers": 12},
    "12 layers, one memory of 512^2": {"layers": 12, "sub_keys": 512},
    "12 layers, one memory of 1024^2": {"layers": 12, "sub_keys": 1024},
    "24 layers, dense": {"layers": 24},
}


@dataclass(frozen=True)
class Row:
    model: str
    training: float
    """Tokens per second."""
    inference: float
    """Tokens per second."""
    training_mfu: float
    inference_mfu: float
    peak_gib: float
    """Allocated at most in training."""


def config_of(layers: int, tokens: int, precision: str, compiled: bool, sub_keys: int | None = None) -> Config:
    memory = {"count": 1, "sub_keys": sub_keys, "heads": 4, "knn": 32} if sub_keys else None
    return Config.model_validate(
        {
            "name": "benchmark",
            "corpus": {"path": "prepared", "context": CONTEXT},
            "model": {"layers": layers, "dim": 1024, "heads": 16},
            "memory": memory,
            "precision": precision,
            "compile": compiled,
            "optim": {
                "steps": 1000,
                "batch_tokens": tokens,
                "values": {"dtype": "bf16", "state_dtype": "bf16"},
            },
        }
    )


STEPS = 3  # of a sample, so that the GPU does not stand still between two of them


def median_seconds(run: Callable[[], object], warm_up: int, repeats: int) -> float:
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        before = time.perf_counter()
        for _ in range(STEPS):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - before) / STEPS)
    return statistics.median(times)


def measure(name: str, config: Config, rate: float, repeats: int) -> Row:
    device, tokens = torch.device("cuda"), config.optim.batch_tokens
    torch.cuda.reset_peak_memory_stats()
    with device:
        model = apply_parallelism(build_model(config, VOCABULARY), config)
    optim = build_optimizers(config.optim, model)
    often = 1 / torch.arange(10.0, VOCABULARY - 4)
    ids = torch.multinomial(often, 4 * (tokens + 1), replacement=True).view(4, -1).to(device) + 14
    turn = [0]

    def loss() -> torch.Tensor:
        turn[0] += 1
        batch = ids[turn[0] % len(ids)]
        with Compute(device, config.precision).autocast():
            return model(batch[:-1].view(-1, CONTEXT), batch[1:].view(-1, CONTEXT)) / tokens

    def training() -> None:
        optim.clear()
        loss().backward()
        norms = optim.gradient_norms()
        optim.step(turn[0], norms)

    def inference() -> None:
        with torch.no_grad():
            loss()

    model.train()
    train_seconds = median_seconds(training, 3, repeats)
    peak = torch.cuda.max_memory_allocated() / 2**30
    optim.clear()
    model.eval()
    inference_seconds = median_seconds(inference, 2, repeats)
    work = flops(config, VOCABULARY)
    mfu = [tokens * w / s / rate for w, s in ((work.training, train_seconds), (work.forward, inference_seconds))]
    return Row(name, tokens / train_seconds, tokens / inference_seconds, *mfu, peak)


def matrix_rate() -> float:
    """FLOP/s of a large matrix product in bf16."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median_seconds(lambda: [a @ b for _ in range(10)], 1, 5) * 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--tokens", type=int, default=16_384, help="of one update")
    parser.add_argument("--precision", choices=["bf16", "fp16"], default="bf16", help="of matrix products")
    parser.add_argument("--compile", action="store_true", help="torch.compile the blocks")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    parser.add_argument("--repeats", type=int, default=6, help="repetitions that a median is over")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    rate = matrix_rate()
    card = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}"
    how = arguments.precision + (", compiled" if arguments.compile else "")
    facts = {"machine": card, "how": how, "bf16 product FLOP/s": rate, "tokens": arguments.tokens}
    rows = []
    for name in arguments.models:
        config = config_of(
            tokens=arguments.tokens, precision=arguments.precision, compiled=arguments.compile, **MODELS[name]
        )
        rows.append(measure(name, config, rate, arguments.repeats))
        if arguments.json:
            arguments.json.write_text(json_text({"facts": facts, "rows": [asdict(r) for r in rows]}, indent=1))
        gc.collect()
        torch.cuda.empty_cache()
    base, deep = rows[0], rows[-1]
    print(f"{card} | {how} | {arguments.tokens} tokens an update | bf16 product {rate / 1e12:.0f} TFLOP/s\n")
    print("| model | training tokens/s | x first row | MFU % | inference tokens/s | x last row | MFU % | peak GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r.model} | {r.training:,.0f} | {r.training / base.training:.3f} | {100 * r.training_mfu:.0f} | {r.inference:,.0f}"
            f" | {r.inference / deep.inference:.3f} | {100 * r.inference_mfu:.0f} | {r.peak_gib:.1f} |"
        )


if __name__ == "__main__":
    main()
