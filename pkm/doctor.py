"""Is this machine fit for a run? Each check finds something out and, where it is not as it should be, says what to do.

torch is imported inside the checks: a machine without a working torch is what a doctor is called for.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rich.markup import escape
from rich.table import Table

from pkm.config import Config, CorpusConfig, MemoryConfig, ModelConfig, OptimConfig
from pkm.count import checkpoint_bytes, size, vocab_size_of
from pkm.errors import UserError

Status = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Finding:
    about: str
    status: Status
    """note = works, or is not needed; fail = a run cannot do without."""
    found: str
    advice: str = ""


def examine(runs: Path, config: Config | None = None) -> Iterator[Finding]:
    """Every check, one after another, the longest one last.

    runs    directory below which runs are written
    config  a run's, to check also what that one needs
    """
    yield python()
    yield from needed_packages()
    yield from guarded("devices", devices)
    yield from optional_packages()
    yield apex()
    yield from guarded("disk", lambda: disk(runs))
    if config is not None:
        yield from guarded("run", lambda: needs_of(config))
    yield from guarded("self-test", self_test)


def guarded(about: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of `check`; whatever it raises is one more."""
    try:
        yield from check()
    except Exception as error:  # a doctor reports what breaks instead of breaking
        yield Finding(about, "fail", f"{type(error).__name__}: {error}", "see the message; reinstall what it names")


def python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable}) on {platform.platform(terse=True)}"
    good = sys.version_info >= (3, 11)
    return Finding("python", "ok" if good else "fail", found, "" if good else "use Python 3.11 or later")


# Package -> (name to import, oldest version that will do): the same as in setup.py.
NEEDED = {
    "torch": ("torch", "2.11"),
    "numpy": ("numpy", None),
    "pyyaml": ("yaml", None),
    "pydantic": ("pydantic", "2.11"),
    "rich": ("rich", None),
    "safetensors": ("safetensors", None),
    "tensorboard": ("tensorboard", None),
    "tokenizers": ("tokenizers", None),
    "zstandard": ("zstandard", None),
}
# Package -> (name to import, what for).
OPTIONAL = {
    "triton": ("triton", "kernels on NVIDIA GPUs"),
    "faiss": ("faiss", "key search, as in the paper"),
    "fastBPE": ("fastBPE", "an independent check of BPE"),
    "sacremoses": ("sacremoses", "an independent check of tokenization"),
    "datatrove": ("datatrove", "preparing corpora on a cluster"),
    "pyarrow": ("pyarrow", "Parquet sources"),
    "submitit": ("submitit", "grids as SLURM arrays"),
    "wandb": ("wandb", "curves on Weights & Biases"),
}
# Names under which the same module is published.
DISTRIBUTIONS = {"faiss": ("faiss-gpu", "faiss-cpu", "faiss-gpu-cu12"), "triton": ("triton", "triton-windows")}


def needed_packages() -> Iterator[Finding]:
    for package, (module, oldest) in NEEDED.items():
        version = version_of(package, module)
        if version is None:
            yield Finding(package, "fail", "not installed", f"pip install {package}")
        elif oldest and _numbers(version) < _numbers(oldest):
            yield Finding(package, "fail", version, f"pip install '{package}>={oldest}'")
        else:
            yield Finding(package, "ok", version)


def optional_packages() -> Iterator[Finding]:
    for package, (module, use) in OPTIONAL.items():
        version = version_of(package, module)
        if version is None:
            yield Finding(package, "note", "not installed", f"optional: {use}")
        else:
            yield Finding(package, "ok", f"{version}: {use}")


def version_of(package: str, module: str) -> str | None:
    """Version of an installed package without importing it; None if its module is not there."""
    if find_spec(module) is None:
        return None
    for name in DISTRIBUTIONS.get(package, (package,)):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown version"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def apex() -> Finding:
    """NVIDIA's apex has optimizers in CUDA; PyPI's package of that name is a web toolkit of 2013."""
    spec = find_spec("apex")
    if spec is None:
        return Finding("apex", "note", "not installed", "optional: torch's own fused Adam is used")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers" / "fused_adam.py").exists() for folder in folders):
        return Finding(
            "apex", "note", "not NVIDIA's, but PyPI's web toolkit of that name", "pip uninstall apex; not used"
        )
    if find_spec("amp_C") is None:
        return Finding(
            "apex", "note", "NVIDIA's, built without its CUDA extensions", "not used: build it with --cuda_ext"
        )
    return Finding("apex", "ok", "NVIDIA's, with its CUDA extensions")


def devices() -> Iterator[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    memory = f", {size(available)} of memory free" if (available := _free_memory()) else ""
    cpu = f"{cores} cores, torch uses {threads} threads, {torch.backends.cpu.get_cpu_capability()}{memory}"
    crowded = threads > cores
    yield Finding("cpu", "note" if crowded else "ok", cpu, "set `threads` to the cores there are" if crowded else "")
    yield Finding("cpu bf16", *_fast_bf16_on_cpu())
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            yield _gpu(i)
    else:
        built = torch.version.cuda or torch.version.hip
        advice = "" if built is None else "check the driver with nvidia-smi"
        found = "none; this torch is built for CPUs" if built is None else f"none that torch {built} can use"
        yield Finding("cuda", "note", found, advice)
    if torch.backends.mps.is_available():
        yield Finding("mps", "ok", "Apple GPU")


def _free_memory() -> int | None:
    """Bytes that can be had without swapping."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else None


def _fast_bf16_on_cpu() -> tuple[Status, str]:
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    found = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in flags]
    return ("ok", f"in hardware ({', '.join(found)})") if found else ("note", "emulated: slower than fp32")


def _gpu(index: int) -> Finding:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    bf16 = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16"
    capability = f"{properties.major}.{properties.minor}"
    found = f"{properties.name}, {size(free)} of {size(total)} free, compute capability {capability}, {bf16}"
    if free < total // 2:
        return Finding(f"cuda:{index}", "note", found, "another program holds most of its memory: see nvidia-smi")
    return Finding(f"cuda:{index}", "ok", found)


PROBE_BYTES = 64 << 20
SLOW_BYTES_PER_SECOND = 50 << 20


def disk(runs: Path) -> Iterator[Finding]:
    """Free space and write speed where runs go."""
    import shutil

    there = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.exists())
    if not there.is_dir():
        yield Finding("disk", "fail", f"{there} is a file", "choose another `runs` directory")
        return
    free = shutil.disk_usage(there).free
    if free < 4 * PROBE_BYTES:
        yield Finding("disk", "fail", f"{size(free)} free at {there}", "free some space")
        return
    try:
        speed = _write_speed(there)
    except OSError as error:
        yield Finding("disk", "fail", f"cannot write to {there}: {error.strerror}", "choose another `runs` directory")
        return
    found = f"{size(free)} free at {there}, {size(int(speed))}/s written and synced"
    slow = speed < SLOW_BYTES_PER_SECOND
    yield Finding("disk", "note" if slow else "ok", found, "checkpoints will take long here" if slow else "")


def _write_speed(folder: Path) -> float:
    """Bytes per second, synced."""
    block = os.urandom(1 << 20)  # not compressible by a file system
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(PROBE_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return PROBE_BYTES / (time.perf_counter() - start)


def needs_of(config: Config) -> Iterator[Finding]:
    """What one run needs: its corpus, its device, room for its checkpoints."""
    import shutil

    vocab_size = vocab_size_of(config.corpus.path)
    if vocab_size is None:
        yield Finding(
            "corpus",
            "fail",
            f"no prepared corpus at {config.corpus.path}",
            "run scripts/prepare.py, or set corpus.path",
        )
    else:
        yield Finding("corpus", "ok", f"{config.corpus.path}, vocabulary {vocab_size:,}")
    from pkm.parallel import pick_device, pick_precision

    try:
        device = pick_device(config)
        yield Finding("device", "ok", f"{device}, {str(pick_precision(config, device)).removeprefix('torch.')}")
    except UserError as error:
        yield Finding("device", "fail", error.what, error.fix or "")
    # Those that are kept, the best, and the one being written before an older one goes.
    each = checkpoint_bytes(config, vocab_size or 0)
    needed = (config.checkpoint.keep + 2) * each
    there = next(folder for folder in config.directory.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(there).free
    enough = needed < free
    found = f"{size(needed)} for checkpoints of {size(each)}, {size(free)} free at {there}"
    yield Finding(
        "room", "ok" if enough else "fail", found, "" if enough else "free some space, or lower checkpoint.keep"
    )


SELF_TEST_SECONDS = 8.0
SELF_TEST_STEPS = 300
SELF_TEST_ENOUGH_STEPS = 100
"""By then the loss is low, with room to spare."""
SELF_TEST_VOCABULARY = 64


def self_test() -> Iterator[Finding]:
    """A tiny model with a memory learns a made-up language in which every token decides the next one, on the device
    that a run would take: its loss must fall from log(vocabulary) to under half of that."""
    import math

    start = time.perf_counter()
    config = Config(
        name="self-test",
        corpus=CorpusConfig(path=Path(), context=32),
        model=ModelConfig(layers=2, dim=64, heads=4),
        memory=MemoryConfig(layers=(1,), sub_keys=16, heads=2, knn=4),
        optim=OptimConfig.model_validate(
            {"steps": SELF_TEST_STEPS, "batch_tokens": 512, "dense": {"lr": 3e-3, "warmup_steps": 20}}
        ),
    )
    losses, device = _train(config, start + SELF_TEST_SECONDS)
    seconds = time.perf_counter() - start
    found = f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} steps, {seconds:.1f} s on {device}"
    finite, learned = all(map(math.isfinite, losses)), losses[-1] < 0.5 * math.log(SELF_TEST_VOCABULARY)
    if finite and learned:
        yield Finding("self-test", "ok", found)
    elif finite and len(losses) < SELF_TEST_ENOUGH_STEPS:
        yield Finding("self-test", "note", found, "too slow to tell whether it learns: is the machine busy?")
    else:
        yield Finding("self-test", "fail", found, "training does not work here: run `make test`")


def _train(config: Config, deadline: float) -> tuple[list[float], str]:
    """Losses in nats per token, step by step, until the steps are done, the loss is low or the time is over."""
    import torch

    from pkm.model import build_model
    from pkm.optim import build_optimizers
    from pkm.parallel import pick_device

    device = pick_device(config)
    threads = torch.get_num_threads()
    # So small a model is no faster on several threads, and on a busy machine much slower.
    torch.set_num_threads(1)
    model = build_model(config, SELF_TEST_VOCABULARY).to(device)
    optim = build_optimizers(config.optim, model)
    generator = torch.Generator().manual_seed(config.seed)
    # Ids below 14 are special; <pad> must not come up.
    successor = 14 + torch.randperm(SELF_TEST_VOCABULARY - 14, generator=generator)
    losses: list[float] = []
    while len(losses) < config.optim.steps and (not losses or (losses[-1] > 0.2 and time.perf_counter() < deadline)):
        tokens = torch.empty(config.sequences, config.corpus.context + 1, dtype=torch.long)
        tokens[:, 0] = torch.randint(14, SELF_TEST_VOCABULARY, (config.sequences,), generator=generator)
        for i in range(config.corpus.context):
            tokens[:, i + 1] = successor[tokens[:, i] - 14]
        tokens = tokens.to(device)
        loss = model(tokens[:, :-1], tokens[:, 1:]) / config.optim.batch_tokens
        loss.backward()
        optim.step(len(losses) + 1, optim.gradient_norms())
        optim.clear()
        losses.append(float(loss.detach()))
    torch.set_num_threads(threads)
    return losses, str(device)


MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fail": "[bold red]FAIL[/]"}


def table(findings: list[Finding]) -> Table:
    """The findings for a terminal."""
    grid = Table(box=None, show_header=False, pad_edge=False)
    for style in ("", "bold", ""):
        grid.add_column(style=style, overflow="fold")
    for finding in findings:
        advice = f"[dim]; {escape(finding.advice)}[/]" if finding.advice else ""
        grid.add_row(MARKS[finding.status], finding.about, escape(finding.found) + advice)
    return grid


def as_json(findings: list[Finding]) -> list[dict[str, str]]:
    return [asdict(finding) for finding in findings]
