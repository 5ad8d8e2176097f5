"""How long a memory layer takes, stage by stage and whole, beside the feed-forward network it replaces and other code.

    python benchmarks/memory_layer.py --device cpu|cuda [--precision fp32|bf16] [--json FILE]

Every number is the median of one run of this program. Floors are counted here, from the sizes, and set against rates that this
run measures: bytes that must pass between memory and chip over the rate of a large copy, and operations over that of a large
matrix product, whichever takes longer.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from pkm.config.schema import MemoryConfig, QueryConfig, ValuesOptim
from pkm.device import DTYPES
from pkm.files import json_text
from pkm.machine import keep_freed_memory
from pkm.memory.adam import ValuesAdam
from pkm.memory.kernels import search_op
from pkm.memory.kernels.row_sum import RowSum
from pkm.memory.layer import MemoryLayer


@dataclass(frozen=True)
class Size:
    """N tokens, width d, H heads, C sub-keys a side, k selected slots, query size q."""

    tokens: int
    dim: int
    heads: int
    sub_keys: int
    knn: int
    query: int

    @property
    def reads(self) -> int:
        return self.tokens * self.heads * self.knn


SIZES = {
    "cuda": [Size(16_384, 1024, 4, sub_keys, 32, 512) for sub_keys in (512, 1024)],
    "cpu": [Size(2_048, 256, 4, 128, 16, query) for query in (256, 512)],
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    slots: int
    what: str
    ms: float
    to_ffn: float | None = None
    gb: float | None = None
    floor_ms: float | None = None
    query: int = 512


# On a GPU a sample is some calls behind a pause of the card: as in training, the CPU has launched them before they run.
BACK_TO_BACK = 3
PAUSE = 20_000_000  # clock cycles, about 11 ms


class Clock:
    """Median time of a function on a device."""

    def __init__(self, device: torch.device, repeats: int, busy: bool = False):
        self.device, self.repeats = device, repeats
        self.now = time.process_time if busy else time.perf_counter

    def __call__(self, run: Callable[[], object], warm_up: int = 3, seconds: float = 0.5) -> float:
        """Milliseconds."""
        for _ in range(warm_up):
            run()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 5 or (len(times) < self.repeats and time.perf_counter() - began < seconds):
            if self.device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                torch.cuda._sleep(PAUSE)
                start.record()
                for _ in range(BACK_TO_BACK):
                    run()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end) / BACK_TO_BACK)
            else:
                before = self.now()
                run()
                times.append(1e3 * (self.now() - before))
        return statistics.median(times)


def ceilings(clock: Clock, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes/s of a large copy (read and written) and operations/s of a large matrix product in `dtype`, as measured now."""
    n = 1 << (28 if clock.device.type == "cuda" else 24)
    a = torch.randn(n, device=clock.device)
    b = torch.empty_like(a)
    copy = 8 * n / (clock(lambda: b.copy_(a)) * 1e-3)
    side = 8192 if clock.device.type == "cuda" else 1024
    x, y = (torch.randn(side, side, device=clock.device).to(dtype) for _ in range(2))
    return copy, 2 * side**3 / (clock(lambda: x @ y) * 1e-3)


def inputs(size: Size, device: torch.device, sets: int = 3) -> list[Tensor]:
    """Several batches (1, N, d) of clustered tokens: text repeats itself, and so do the slots that it reads."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(size.tokens // 16, size.dim, generator=generator)
    often = torch.arange(1, len(centres) + 1).float() ** -0.5
    which = [torch.multinomial(often, size.tokens, replacement=True, generator=generator) for _ in range(sets)]
    noise = torch.randn(sets, size.tokens, size.dim, generator=generator)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # what autocast would make of it
    return [(centres[w] + 0.17 * z).to(device, dtype).unsqueeze(0) for w, z in zip(which, noise, strict=True)]


class FeedForward(nn.Sequential):
    """The network that a memory replaces: 4 d hidden features, GELU."""

    def __init__(self, dim: int):
        super().__init__(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


class PlainMemory(nn.Module):
    """The paper's layer as one writes it first: top k of each half, top k of all k * k sums, EmbeddingBag."""

    def __init__(self, size: Size, sparse: bool):
        super().__init__()
        self.size = size
        self.query = nn.Linear(size.dim, size.heads * size.query)
        self.norm = nn.BatchNorm1d(size.heads * size.query)
        bound = (size.query // 2) ** -0.5
        self.keys = nn.Parameter(torch.empty(size.heads, 2, size.sub_keys, size.query // 2).uniform_(-bound, bound))
        self.values = nn.EmbeddingBag(size.sub_keys**2, size.dim, mode="sum", sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        s, shape = self.size, x.shape
        query = self.norm(self.query(x.flatten(0, -2))).view(-1, s.heads, 2, s.query // 2)
        best, index = torch.einsum("nhsq,hscq->nhsc", query, self.keys).float().topk(s.knn, dim=-1)
        sums = (best[:, :, 0, :, None] + best[:, :, 1, None, :]).flatten(-2)
        slots = (index[:, :, 0, :, None] * s.sub_keys + index[:, :, 1, None, :]).flatten(-2)
        best, place = sums.topk(s.knn, dim=-1)
        weights, slots = best.softmax(-1), slots.gather(-1, place)
        with torch.autocast(x.device.type, enabled=False):
            return self.values(slots.flatten(1), per_sample_weights=weights.flatten(1)).view(shape)


Adams = list[torch.optim.Optimizer]


def plain_optimizers(model: nn.Module, table: nn.Parameter, sparse: bool) -> Adams:
    rest = [p for p in model.parameters() if p is not table]
    fused = torch.optim.Adam(rest, lr=2.5e-4, fused=True)
    return [
        fused,
        torch.optim.SparseAdam([table], lr=1e-3) if sparse else torch.optim.Adam([table], lr=1e-3, fused=True),
    ]


class Whole:
    """Forward, + backward, + update of one module over rotating batches."""

    def __init__(
        self, module: nn.Module, batches: list[Tensor], dtype: torch.dtype, values_only: Callable[[], None] | None
    ):
        self.module, self.batches, self.dtype, self.update = module, batches, dtype, values_only
        self.turn = 0
        self.before: Callable[[], None] = lambda: None

    def forward(self, grad: bool = False) -> Tensor:
        self.turn += 1
        x = self.batches[self.turn % len(self.batches)]
        with torch.autocast(x.device.type, dtype=self.dtype, enabled=self.dtype is not torch.float32):
            if not grad:
                with torch.no_grad():
                    return self.module(x)
            return self.module(x.detach().requires_grad_())

    def backward(self) -> None:
        self.before()
        out = self.forward(grad=True)
        out.backward(torch.ones_like(out) if self.turn < 2 else out.detach())
        for p in self.module.parameters():
            if p is not self.keep:
                p.grad = None

    keep: nn.Parameter | None = None

    def step(self) -> None:
        self.backward()
        if self.update is not None:
            self.update()


def measure_whole(whole: Whole, clock: Clock) -> tuple[float, float, float]:
    """Milliseconds of forward, forward + backward, and those with the update (of the values, where there are any)."""
    return clock(whole.forward), clock(whole.backward), clock(whole.step)


def ours(
    size: Size, settings: ValuesOptim, device: torch.device, kernels: str = "auto"
) -> tuple[MemoryLayer, ValuesAdam]:
    config = MemoryConfig(
        layers=(1,),
        sub_keys=size.sub_keys,
        heads=size.heads,
        knn=size.knn,
        query=QueryConfig(dim=size.query),
        kernels=kernels,
    )
    with device:
        layer = MemoryLayer(config, size.dim)
    return layer, ValuesAdam({"values": layer.values}, settings)


def our_whole(layer: MemoryLayer, adam: ValuesAdam, batches: list[Tensor], dtype: torch.dtype) -> Whole:
    count = [0]

    def update() -> None:
        count[0] += 1
        adam.step(1e-3, count[0])
        adam.clear()

    def before() -> None:
        adam.clear()
        adam.begin(1e-3, count[0] + 1)

    whole = Whole(layer, batches, dtype, update)
    whole.before = before
    return whole


PASSES, CLIP, SCALE = 2, 5.0, 2.0**10


def as_configured(
    layer: MemoryLayer, adam: ValuesAdam, batches: list[Tensor], dtype: torch.dtype
) -> Callable[[], None]:
    """A step as configs/paper has it: the tokens in two passes (16,384 are twice 32 windows of 256), a loss scale, and a
    clipping norm; with them the scale is taken out."""
    turn, scale = [0], torch.tensor(SCALE, device=batches[0].device)

    def step() -> None:
        turn[0] += 1
        adam.clear()
        x = batches[turn[0] % len(batches)]
        for part in x.to(dtype).chunk(PASSES, 1):
            with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not torch.float32):
                out = layer(part.detach().requires_grad_())
            out.backward(out.detach() * scale)
        norm = adam.gradient_norm() / scale
        adam.step(1e-3, turn[0], torch.where(norm <= CLIP, 1.0, CLIP / (norm + 1e-6)) / scale)
        for p in layer.parameters():
            p.grad = None

    return step


OURS = {
    "fused, fp32 state": ValuesOptim(update="in_backward", dtype="bf16+master"),
    "sparse, fp32 state": ValuesOptim(update="sparse", dtype="bf16+master"),
    "fused, bf16 state": ValuesOptim(update="in_backward", dtype="bf16", state_dtype="bf16"),
    "sparse, bf16 state": ValuesOptim(update="sparse", dtype="bf16", state_dtype="bf16"),
}
OURS_CPU = {
    "sparse, fp32": ValuesOptim(update="sparse"),
    "fused, fp32": ValuesOptim(update="in_backward"),
}


def floors(size: Size, used: int, settings: ValuesOptim, copy: float, rate: float, compute: int) -> dict[str, float]:
    """Least milliseconds of forward, + backward, + update: max(operations / rate, bytes / copy), counted from the sizes.

    used     distinct slots that a batch reads;  compute  bytes of a number in matrix products
    """
    s = size
    width = s.heads * s.query
    value = 2 if settings.dtype != "fp32" else 4
    moment = 2 if settings.state_dtype == "bf16" else 4
    master = 4 if settings.dtype == "bf16+master" else 0
    operations = 2 * s.tokens * s.dim * width + 2 * s.tokens * width * s.sub_keys  # query network, sub-key scores
    moved = s.tokens * s.dim * 2 * compute + s.dim * width * compute + used * s.dim * value + s.reads * 8
    forward = max(operations / rate, moved / copy)
    back_moved = s.tokens * s.dim * 2 * compute + 2 * s.dim * width * compute + used * s.dim * value + s.reads * 12
    backward = max(2 * operations / rate, back_moved / copy)
    update = used * s.dim * 2 * (value * (0.5 if master else 1) + 2 * moment + master) / copy
    return {
        "forward": 1e3 * forward,
        "backward": 1e3 * (forward + backward),
        "step": 1e3 * (forward + backward + update),
    }


def stages(
    layer: MemoryLayer, batches: list[Tensor], dtype: torch.dtype, clock: Clock
) -> dict[str, tuple[float, float | None]]:
    """Milliseconds and gigabytes that the stage reads and writes, wherever they come from, of each stage of our forward and backward."""
    from pkm.memory.kernels import cpu

    x = batches[0].flatten(0, -2)
    device = x.device
    assert layer.backend is not None
    kernels = layer.backend.name
    found: dict[str, tuple[float, float | None]] = {}
    with torch.no_grad(), torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
        query, scale, *_ = layer.query(x)
        query = query.to(dtype)
        keys = (layer.keys.weight * scale.view(layer.heads, 2, 1, -1)).to(dtype)
        bias = torch.randn(keys.shape[:3], device=device) * 0.01
    scores = search_op.sub_key_scores(query, keys)  # as in the layer: no autocast from here on, sums in fp32
    slots, weights = search_op.search(query, keys, bias, layer.knn, kernels)
    n, _, k = slots.shape
    flat, w = slots.flatten(1), weights.flatten(1)
    table = layer.values.weight
    grad = torch.randn(n, table.shape[1], device=device).to(dtype)
    gather = flat.numel() * table.shape[1] * table.element_size()

    def query_network() -> None:
        with torch.no_grad(), torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
            layer.query(x)

    found["query network, BatchNorm statistics"] = clock(query_network), None
    found["sub-key scores"] = clock(lambda: search_op.sub_key_scores(query, keys)), 1e-9 * scores.numel() * 4
    if kernels == "triton":
        from pkm.memory.kernels import triton_read, triton_rows, triton_search

        found["selection and softmax"] = (
            clock(lambda: triton_search.search_into(scores, bias, slots, weights)),
            1e-9 * (scores.numel() * 4 + slots.numel() * 8),
        )
        found["search, scores in pieces that stay in L2"] = (
            clock(lambda: search_op.search(query, keys, bias, layer.knn, kernels)),
            None,
        )
        found["search, all scores at once"] = (
            clock(lambda: triton_search.search_into(search_op.sub_key_scores(query, keys), bias, slots, weights)),
            None,
        )
        found["read"] = clock(lambda: triton_read.read(table, flat, w, dtype)), 1e-9 * gather
        found["sort by row"] = clock(lambda: triton_rows.plan(flat)), 1e-9 * flat.numel() * 12
        plan, total = triton_rows.plan(flat), RowSum(table)

        def into_sum() -> None:
            total.clear()
            triton_rows.backward(plan, grad, table, w, total)

        into_sum()
        summed = int(total.state[1]) * table.shape[1] * 4
        found["backward of the read, into a sum"] = (
            clock(into_sum),
            1e-9 * (flat.numel() * table.shape[1] * grad.element_size() + summed),
        )
    else:
        found["selection and softmax"] = clock(lambda: cpu.search(scores, bias, k)), 1e-9 * scores.numel() * 4
        found["read"] = clock(lambda: cpu.read(table, flat, w)), 1e-9 * gather
        found["backward of the read by weights"] = clock(lambda: cpu.weight_gradient(grad, table, flat)), 1e-9 * gather
        found["backward of the read by rows"] = clock(lambda: cpu.row_gradient(grad, flat, w)), 1e-9 * gather
    gw = torch.randn_like(weights)
    found["backward of the search"] = (
        clock(lambda: search_op.search_backward(gw, slots, weights, query, keys, kernels)),
        None,
    )
    return found


Facts = dict[str, float | str]


def benchmark(
    device: torch.device, dtype: torch.dtype, repeats: int, busy: bool, save: Callable[[list[Row], Facts], None]
) -> tuple[list[Row], Facts]:
    """Rows and facts of all sizes; `save` is called with those so far after each size."""
    clock = Clock(device, repeats, busy)
    copy, rate = ceilings(clock, dtype)
    rows: list[Row] = []
    facts: Facts = {"copy TB/s": copy / 1e12, f"{str(dtype)[6:]} product TFLOP/s": rate / 1e12}
    for size in SIZES[device.type]:
        slots, before = size.sub_keys**2, len(rows)
        batches = inputs(size, device)
        names = ("forward", "backward", "step")
        labels = ("forward", "forward + backward", "forward + backward + update")

        ffn = FeedForward(size.dim).to(device)
        adam = torch.optim.Adam(ffn.parameters(), lr=1e-3, fused=True)
        base = measure_whole(Whole(ffn, batches, dtype, adam.step), clock)
        rows += [Row(slots, f"FFN 4d: {label}", ms, 1.0) for label, ms in zip(labels, base, strict=True)]

        for label, settings in (OURS if device.type == "cuda" else OURS_CPU).items():
            layer, optimizer = ours(size, settings, device)
            layer.record = True
            whole = our_whole(layer, optimizer, batches, dtype)
            whole.forward()
            used = int(layer.selection[0].unique().numel())
            layer.record = False
            facts[f"{size.sub_keys}^2 slots read by a batch, %"] = 100 * used / slots
            counts = torch.bincount(layer.selection[0].flatten().long())
            facts[f"{size.sub_keys}^2 reads of the hottest slot"] = int(counts.max())
            del layer.selection
            if label == next(iter(OURS if device.type == "cuda" else OURS_CPU)):
                for stage, (ms, gb) in stages(layer, batches, dtype, clock).items():
                    rows.append(Row(slots, f"ours, stage: {stage}", ms, ms / base[0], gb))
            times = measure_whole(whole, clock)
            least = floors(size, used, settings, copy, rate, 2 if dtype is torch.bfloat16 else 4)
            for name, text, ms, ffn_ms in zip(names, labels, times, base, strict=True):
                rows.append(Row(slots, f"ours, {label}: {text}", ms, ms / ffn_ms, None, least[name]))
            del layer, optimizer, whole
            if device.type == "cuda":
                torch.cuda.empty_cache()
        settings = ValuesOptim(update="sparse", clip=CLIP)
        paper = torch.float16 if device.type == "cuda" else dtype
        layer, optimizer = ours(size, settings, device)
        ms = clock(as_configured(layer, optimizer, batches, paper))
        what = f"ours, as configs/paper ({str(paper)[6:]}, fp32 values, {PASSES} passes, clip): {labels[-1]}"
        compute = 2 if paper is not torch.float32 else 4
        least = floors(size, used, settings, copy, rate, compute)["step"]
        rows.append(Row(slots, what, ms, ms / base[-1], None, least))
        del layer, optimizer
        rows += others(size, batches, base, labels, clock, dtype)
        rows[before:] = [replace(row, query=size.query) for row in rows[before:]]
        save(rows, facts)
    return rows, facts


def others(
    size: Size,
    batches: list[Tensor],
    base: tuple[float, ...],
    labels: tuple[str, ...],
    clock: Clock,
    dtype: torch.dtype,
) -> list[Row]:
    """Plain PyTorch, and the PyPI package product-key-memory where it is installed."""
    device, slots = batches[0].device, size.sub_keys**2
    modules: list[tuple[str, nn.Module, nn.Parameter, bool]] = []
    sparse = device.type == "cpu"
    plain = PlainMemory(size, sparse).to(device)
    modules.append((f"plain PyTorch, {'SparseAdam' if sparse else 'dense Adam'}", plain, plain.values.weight, sparse))
    try:
        from product_key_memory import PKM
    except ImportError:
        pass
    else:
        package = PKM(size.dim, heads=size.heads, num_keys=size.sub_keys, topk=size.knn, dim_head=size.query // 2)
        package = package.to(device)
        modules.append(("product-key-memory, dense Adam", package, package.values.weight, False))
        if sparse:
            package = PKM(size.dim, heads=size.heads, num_keys=size.sub_keys, topk=size.knn, dim_head=size.query // 2)
            package.values.sparse = True
            modules.append(("product-key-memory, SparseAdam", package, package.values.weight, True))
    rows = []
    for name, module, table, is_sparse in modules:
        _, values = plain_optimizers(module, table, is_sparse)

        def update(values: torch.optim.Optimizer = values, table: nn.Parameter = table) -> None:
            values.step()
            table.grad = None

        whole = Whole(module, batches, dtype, update)
        whole.keep = table
        whole.before = lambda table=table: setattr(table, "grad", None)  # type: ignore[misc]
        times = measure_whole(whole, clock)
        rows += [Row(slots, f"{name}: {t}", ms, ms / f) for t, ms, f in zip(labels, times, base, strict=True)]
    return rows


def table(rows: list[Row], facts: dict[str, float | str]) -> str:
    lines = [
        " | ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in facts.items()
        )
    ]
    lines += ["", "| slots | query | what | ms | x FFN | GB/s | % of floor |", "|---|---|---|---|---|---|---|"]
    for r in rows:
        rate = f"{r.gb / (r.ms * 1e-3):,.0f}" if r.gb else ""
        floor = f"{100 * r.floor_ms / r.ms:.0f} (floor {r.floor_ms:.2f} ms)" if r.floor_ms else ""
        lines.append(f"| {r.slots} | {r.query} | {r.what} | {r.ms:.3f} | {r.to_ffn:.2f} | {rate} | {floor} |")
    return "\n".join(lines)


def machine(device: torch.device) -> str:
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], help="of products; default: fp32 on a CPU, bf16 on a GPU"
    )
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--repeats", type=int, default=30, help="most repetitions that a median is over")
    parser.add_argument(
        "--busy",
        action="store_true",
        help="on a CPU that others use too: one thread, and its CPU time instead of the clock's",
    )
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.busy:
        torch.set_num_threads(1)
    if device.type == "cpu":
        keep_freed_memory()  # as training does; the others gain from it too
    torch.manual_seed(0)
    where: Facts = {"machine": machine(device) + (", CPU time" if arguments.busy else "")}

    def save(rows: list[Row], facts: Facts) -> None:
        if arguments.json:
            numbers = {"facts": where | facts, "rows": [asdict(r) for r in rows]}
            arguments.json.write_text(json_text(numbers, indent=1))

    precision = arguments.precision or ("bf16" if device.type == "cuda" else "fp32")
    where["precision"] = precision
    rows, facts = benchmark(device, DTYPES[precision], arguments.repeats, arguments.busy, save)
    print(table(rows, where | facts))


if __name__ == "__main__":
    main()
