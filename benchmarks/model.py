"""Tokens per second of whole language models, with and without a memory, in training and inference, and where a step's time goes.

    python benchmarks/model.py [--device cuda|cpu] [--json FILE] [--tokens N] [--precision bf16|fp16|fp32] [--compile]

On a GPU: width 1024, 16 heads, context 256, 60,014 subwords. Rows: 12 layers dense; 12 layers with one memory of 512^2 slots, and of
1024^2, in place of a feed-forward network (values and their moments in bf16); 24 layers dense. On a CPU everything is small: it shows
that this program works, no more. Training is forward, backward, gradient norms and both optimizers' updates, as in train.py; inference
is the loss without gradients. MFU is `pkm.model.cost`'s FLOPs a token over the rate of a large matrix product, as measured now. Tokens
are clustered as words are: their ids follow Zipf's law.

A part's floor is the longer of its operations at the rate of that product and of its bytes at that of a large copy. `waiting` is what a
step takes longer than its parts do one after another on a GPU that was given all of it before.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pkm.config.schema import Config
from pkm.device import Compute
from pkm.files import json_text
from pkm.model.cost import flops
from pkm.model.transformer import Transformer, build_model, parameters
from pkm.train.optim import build_optimizers
from pkm.train.parallel import apply_parallelism


@dataclass(frozen=True)
class Size:
    """What all models of a device have in common, and what each has besides."""

    dim: int
    heads: int
    context: int
    vocabulary: int
    tokens: int
    """Of one update."""
    models: dict[str, dict[str, Any]]


SIZES = {
    "cuda": Size(
        dim=1024,
        heads=16,
        context=256,
        vocabulary=60_014,
        tokens=16_384,
        models={
            "12 layers, dense": {"layers": 12},
            "12 layers, one memory of 512^2": {"layers": 12, "sub_keys": 512},
            "12 layers, one memory of 1024^2": {"layers": 12, "sub_keys": 1024},
            "24 layers, dense": {"layers": 24},
        },
    ),
    "cpu": Size(
        dim=64,
        heads=4,
        context=32,
        vocabulary=1000,
        tokens=256,
        models={
            "2 layers, dense": {"layers": 2},
            "2 layers, one memory of 32^2": {"layers": 2, "sub_keys": 32},
            "4 layers, dense": {"layers": 4},
        },
    ),
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
    """Allocated at most in training; 0 on a CPU."""
    parts: dict[str, tuple[float, float]]
    """Milliseconds of a training step by part, and their floors."""


def config_of(
    size: Size, layers: int, tokens: int, precision: str, compiled: bool, sub_keys: int | None = None
) -> Config:
    memory = {"count": 1, "sub_keys": sub_keys, "heads": 4, "knn": min(32, sub_keys)} if sub_keys else None
    return Config.model_validate(
        {
            "name": "benchmark",
            "corpus": {"path": "prepared", "context": size.context},
            "model": {"layers": layers, "dim": size.dim, "heads": size.heads},
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
PAUSE = 200_000_000  # clock cycles, about 0.1 s: in which all of a step is launched


def median_seconds(run: Callable[[], object], warm_up: int, repeats: int, device: torch.device) -> float:
    wait = Compute(device, "fp32").wait
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(repeats):
        wait()
        before = time.perf_counter()
        for _ in range(STEPS):
            run()
        wait()
        times.append((time.perf_counter() - before) / STEPS)
    return statistics.median(times)


class _Mark(torch.autograd.Function):
    """The tensor itself; calls one function when forward passes, and one when backward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, now: Callable[[], None], then: Callable[[], None]) -> Tensor:
        ctx.then = then
        now()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.then()
        return grad, None, None


class Parts:
    """When the parts of a step begin and end, forward and backward, on the device's own clock."""

    def __init__(self, model: Transformer, device: torch.device):
        self.cuda = device.type == "cuda"
        self.begun: dict[str, Any] = {}
        self.spans: list[tuple[str, Any, Any]] = []
        for block in model.blocks:
            for name, module in (
                ("attention", block.attention),
                ("feed-forward", block.feed_forward),
                ("memory", block.memory),
            ):
                if isinstance(module, nn.Module):
                    self._watch(name, module, module)
        self._watch("output layer", model.final_norm, model)

    def _watch(self, part: str, first: nn.Module, last: nn.Module) -> None:
        """From where `first` is called to where `last` returns, and the same way back."""
        first.register_forward_pre_hook(
            lambda _, inputs: (_Mark.apply(inputs[0], partial(self.begin, part), partial(self.end, part)), *inputs[1:])
        )
        last.register_forward_hook(
            lambda _, inputs, output: _Mark.apply(output, partial(self.end, part), partial(self.begin, part))
        )

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, part: str) -> None:
        self.begun[part] = self._now()

    def end(self, part: str) -> None:
        self.spans.append((part, self.begun.pop(part), self._now()))

    def milliseconds(self) -> dict[str, float]:
        """Of each part since the last call."""
        if self.cuda:
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        for part, begin, end in self.spans:
            took = begin.elapsed_time(end) if self.cuda else 1e3 * (end - begin)
            found[part] = found.get(part, 0.0) + took
        self.spans.clear()
        return found


PARTS = ("attention", "feed-forward", "memory", "output layer", "optimizer")


def floors(config: Config, model: Transformer, used: int, rate: float, copy: float) -> dict[str, float]:
    """Least milliseconds of each part of a training step; `used`: slots that a batch reads."""
    tokens, work = config.optim.batch_tokens, flops(config, model.tokens.num_embeddings)
    dense, values = parameters(model)
    row = 2 * values // config.memory.size if config.memory else 0  # bytes, of values in bf16
    operations = {
        "attention": 3 * work.attention,
        "feed-forward": 3 * work.feed_forward,
        "memory": 3 * (work.query + work.read) + work.search + work.search_backward,
        "output layer": 3 * work.output,
    }
    moved = {
        "memory": used * row * (1 + 1 + 2),  # read in forward and in backward, and the gradient in fp32 written
        "optimizer": dense * (4 + 28)
        + used * row * (2 + 3 * 2),  # norms; weights, gradients, moments; the values' in bf16
    }
    return {part: 1e3 * max(operations.get(part, 0) * tokens / rate, moved.get(part, 0) / copy) for part in PARTS}


def measure(name: str, config: Config, size: Size, device: torch.device, rate: float, copy: float, repeats: int) -> Row:
    tokens, cuda = config.optim.batch_tokens, device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with device:
        model = apply_parallelism(build_model(config, size.vocabulary), config)
    optim = build_optimizers(config.optim, model)
    often = 1 / torch.arange(10.0, size.vocabulary - 4)
    ids = torch.multinomial(often, 4 * (tokens + 1), replacement=True).view(4, -1).to(device) + 14
    turn = [0]

    def loss() -> Tensor:
        turn[0] += 1
        batch = ids[turn[0] % len(ids)]
        with Compute(device, config.precision).autocast():
            return model(batch[:-1].view(-1, size.context), batch[1:].view(-1, size.context)) / tokens

    def training(parts: Parts | None = None) -> None:
        optim.clear()
        loss().backward()
        if parts:
            parts.begin("optimizer")
        optim.step(turn[0], optim.gradient_norms())
        if parts:
            parts.end("optimizer")

    def inference() -> None:
        with torch.no_grad():
            loss()

    model.train()
    train_seconds = median_seconds(training, 3, repeats, device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    optim.clear()
    model.eval()
    inference_seconds = median_seconds(inference, 2, repeats, device)
    for _, memory in model.memories():
        memory.record = True
    inference()
    used = sum(int(memory.selection[0].unique().numel()) for _, memory in model.memories())
    for _, memory in model.memories():
        memory.record = False
        del memory.selection
    parts = {} if config.compile else by_part(model.train(), training, device, repeats)
    least = floors(config, model, used, rate, copy)
    if parts:
        parts["waiting"] = max(0.0, 1e3 * train_seconds - sum(parts.values()))
    work = flops(config, size.vocabulary)
    mfu = [tokens * w / s / rate for w, s in ((work.training, train_seconds), (work.forward, inference_seconds))]
    each = {part: (ms, least.get(part, 0.0)) for part, ms in parts.items()}
    return Row(name, tokens / train_seconds, tokens / inference_seconds, *mfu, peak, each)


def by_part(
    model: Transformer, training: Callable[[Parts], None], device: torch.device, repeats: int
) -> dict[str, float]:
    """Milliseconds of each part of a step, and of the `rest`: embeddings, norms, dropout and sums."""
    parts, found = Parts(model, device), []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(PAUSE)
        parts.begin("step")
        training(parts)
        parts.end("step")
        found.append(parts.milliseconds())
    medians = {part: statistics.median(one[part] for one in found[1:]) for part in found[0]}
    whole = medians.pop("step")
    return {part: medians[part] for part in PARTS if part in medians} | {"rest": whole - sum(medians.values())}


def rates(device: torch.device) -> tuple[float, float]:
    """FLOP/s of a large matrix product, in bf16 on a GPU, and bytes/s of a large copy, read and written."""
    cuda = device.type == "cuda"
    side, numbers = (8192, 1 << 28) if cuda else (512, 1 << 22)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16 if cuda else torch.float32) for _ in range(2))
    x = torch.empty(numbers, device=device)
    y = torch.empty_like(x)
    product = median_seconds(lambda: [a @ b for _ in range(10)], 1, 5, device) / 10
    return 2 * side**3 / product, 8 * numbers / median_seconds(lambda: y.copy_(x), 1, 5, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(SIZES), default="cuda")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--tokens", type=int, help="of one update; default: 16,384 on a GPU, 256 on a CPU")
    parser.add_argument("--precision", choices=["bf16", "fp16", "fp32"], help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the blocks; then without the table of parts"
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--repeats", type=int, default=6, help="repetitions that a median is over")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a CUDA device, or --device cpu")
    device, size = torch.device(arguments.device), SIZES[arguments.device]
    if unknown := set(arguments.models or ()) - set(size.models):
        parser.error(f"there is no model {unknown.pop()!r}: choose from {', '.join(map(repr, size.models))}")
    tokens, precision = (
        arguments.tokens or size.tokens,
        arguments.precision or ("bf16" if device.type == "cuda" else "fp32"),
    )
    rate, copy = rates(device)
    card = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    card = f"{card}, torch {torch.__version__}, Python {platform.python_version()}"
    how = precision + (", compiled" if arguments.compile else "")
    facts = {"machine": card, "how": how, "product FLOP/s": rate, "copy B/s": copy, "tokens": tokens}
    rows = []
    for name in arguments.models or size.models:
        config = config_of(size, tokens=tokens, precision=precision, compiled=arguments.compile, **size.models[name])
        rows.append(measure(name, config, size, device, rate, copy, arguments.repeats))
        if arguments.json:
            arguments.json.write_text(json_text({"facts": facts, "rows": [asdict(r) for r in rows]}, indent=1))
        gc.collect()
        torch.cuda.empty_cache()
    base, deep = rows[0], rows[-1]
    print(
        f"{card} | {how} | {tokens} tokens an update | product {rate / 1e12:.3g} TFLOP/s, copy {copy / 1e12:.3g} TB/s\n"
    )
    print("| model | training tokens/s | x first row | MFU % | inference tokens/s | x last row | MFU % | peak GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r.model} | {r.training:,.0f} | {r.training / base.training:.3f} | {100 * r.training_mfu:.0f} | {r.inference:,.0f}"
            f" | {r.inference / deep.inference:.3f} | {100 * r.inference_mfu:.0f} | {r.peak_gib:.1f} |"
        )
    if not arguments.compile:
        print("\n| ms of a training step (floor) | " + " | ".join((*PARTS, "rest", "waiting")) + " |")
        print("|---" * (len(PARTS) + 3) + "|")
    for r in rows if not arguments.compile else ():
        each = (
            f"{ms:.2f} ({least:.2f})" if least else f"{ms:.2f}"
            for ms, least in (r.parts.get(p, (0.0, 0.0)) for p in (*PARTS, "rest", "waiting"))
        )
        print(f"| {r.model} | " + " | ".join(each) + " |")


if __name__ == "__main__":
    main()
