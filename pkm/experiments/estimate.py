"""How long runs take: from the speed of runs like them where there are some, else from this machine's matrix products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from pkm.config.load import load
from pkm.config.schema import Config
from pkm.corpus.store import Corpus, Split, open_corpus
from pkm.device import DTYPES, pick_device, pick_precision, settled
from pkm.errors import UserError
from pkm.evaluation.speed import ROUNDS, SECONDS
from pkm.experiments.jobs import Job
from pkm.experiments.task import Progress
from pkm.model.cost import PAPER_VOCABULARY, flops, numbers_made, training_bytes

EFFICIENCY = 0.25
"""Of a matrix product's rate, what a whole training step reaches on a GPU. Runs got 20 to 50 % of it."""
CPU_EFFICIENCY = 0.9
"""Of that rate, what a CPU's products reach; the rest of its step is counted apart, since in narrow models it is most of it."""
PASSES = 13
"""How often a CPU moves each number that a step makes, 4 bytes a time: forward, backward, casts. Steps of widths 32 to 256 in
bf16, with 0 to 256 reads of a memory, took 12 to 15 passes; with dropout 20."""
LAUNCH_SECONDS = 2e-3
"""What a block takes a GPU at least, forward, backward and update: its kernels are launched one by one."""
START_SECONDS = 6.0
"""Of a process before its first step; on a GPU it is twice that."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of one run on one worker."""

    train: float
    """From its start to its report."""
    speed: float
    """To measure its words a second alone; 0 where that is not asked for."""
    memory: int
    """Bytes of one rank in training, about."""
    basis: str


class Estimator:
    """ranks    processes of a run, taken to be as many times as fast"""

    def __init__(self, ranks: int = 1):
        self.ranks = ranks
        self._own: dict[Config, float] = {}
        self._rates: dict[Config, float] = {}
        self._corpora: dict[Path, Corpus | None] = {}

    def learn(self, config: Config, tokens_per_second: float) -> None:
        """A run got so far in a second."""
        self._own[_without_seed(config)] = tokens_per_second
        self._rates[config] = tokens_per_second * flops(config, self.vocabulary(config)).training

    def learn_from_disk(self, folder: Path) -> int:
        """Take up every run in a folder; returns how many had something to tell."""
        for file in folder.glob("*/config.yaml"):
            progress = Progress()
            progress.read(file.parent)
            if progress.tokens_per_second:
                try:
                    self.learn(load(file, (), Config, say=lambda line: None).config, progress.tokens_per_second)
                except UserError:
                    continue
        return len(self._rates)

    def tokens_per_second(self, config: Config) -> tuple[float, str]:
        """In training, and from what it is concluded."""
        own = self._own.get(_without_seed(config))
        if own is not None:
            return own, "this cell's own runs"
        work = flops(config, self.vocabulary(config)).training
        if self._rates:
            return statistics.median(self._rates.values()) / work, f"{len(self._rates)} runs of this scale"
        device, precision = _where(config)
        rate = matmul_rate(device, precision, config.threads) * self.ranks
        tokens = config.optim.batch_tokens
        if device == "cuda":
            passes = -(-config.sequences // (config.optim.micro_batch or config.sequences) // self.ranks)
            launched = config.model.layers * LAUNCH_SECONDS * max(passes, 1)
            seconds = max(tokens * work / (rate * EFFICIENCY), launched)
            return tokens / seconds, f"{EFFICIENCY:.0%} of this machine's matrix products"
        moved = numbers_made(config, self.vocabulary(config)) * PASSES * 4
        seconds = tokens * work / (rate * CPU_EFFICIENCY) + moved / (copy_rate(config.threads) * self.ranks)
        return tokens / seconds, "this machine's matrix products and memory"

    def of(self, job: Job, done: int = 0) -> Estimate:
        """What is left of a job after `done` steps."""
        config = job.config
        speed, basis = self.tokens_per_second(config)
        work = flops(config, self.vocabulary(config))
        forward = speed * work.training / work.forward
        start = START_SECONDS * (1 + (_where(config)[0] == "cuda"))
        corpus = self.corpus(config)
        measured = min(SECONDS, _tokens(corpus.test, None) / forward) if corpus else SECONDS
        train = 0.0
        if job.trained:
            train = start + (config.optim.steps - done) * config.optim.batch_tokens / speed + measured
            train += self._scored(config, done) / forward
        memory = training_bytes(settled(config), self.vocabulary(config), self.ranks).total
        return Estimate(train, ROUNDS * start + measured if job.timed else 0.0, memory, basis)

    def _scored(self, config: Config, done: int) -> float:
        """Tokens that are scored from here to the report."""
        corpus, asked = self.corpus(config), config.evaluate
        if corpus is None:
            return 0.0
        times = -(-(config.optim.steps - done) // asked.every_steps)
        return (
            times * _tokens(corpus.valid, asked.documents)
            + _tokens(corpus.test, asked.test_documents)
            + (_tokens(corpus.train, asked.train_documents) if asked.train_documents else 0.0)
        )

    def corpus(self, config: Config) -> Corpus | None:
        """The prepared corpus of a config; None as long as there is none. UserError for one that a run would refuse."""
        path = config.corpus.path
        if path not in self._corpora:
            self._corpora[path] = open_corpus(path) if (path / "manifest.json").exists() else None
        return self._corpora[path]

    def vocabulary(self, config: Config) -> int:
        """Of its corpus, or the paper's."""
        corpus = self.corpus(config)
        return corpus.vocab.size if corpus else PAPER_VOCABULARY


def total(estimates: Iterable[Estimate], workers: int) -> float:
    """Seconds of all runs: side by side on the workers, then the words a second one by one."""
    known = list(estimates)
    train = [one.train for one in known]
    return max(sum(train) / workers, max(train, default=0.0)) + sum(one.speed for one in known)


@cache
def matmul_rate(device: str, precision: str, threads: int | None) -> float:
    """FLOP/s of a product of two square matrices on this machine: the best of some that take a third of a second in all."""
    n = 4096 if device == "cuda" else 1024
    a = torch.randn(n, n, device=device).to(DTYPES[precision])

    def product() -> None:
        a @ a
        if device == "cuda":
            torch.cuda.synchronize()

    return 2 * n**3 / _best_seconds(product, threads, device)


@cache
def copy_rate(threads: int | None) -> float:
    """Bytes/s that this machine's memory reads and writes in a copy of 64 MB, which no cache holds."""
    a = torch.ones(1 << 24)
    b = torch.empty_like(a)
    return 2 * a.nbytes / _best_seconds(lambda: b.copy_(a), threads)


def _best_seconds(work: Callable[[], object], threads: int | None, device: str = "cpu") -> float:
    """The shortest of the calls that fit into a third of a second; a CPU's as if nothing else ran on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    share = torch.get_num_threads()
    best, end = float("inf"), time.perf_counter() + 0.3
    while time.perf_counter() < end or best == float("inf"):
        began, worked = time.perf_counter(), time.process_time()
        work()
        seconds = time.perf_counter() - began
        best = min(best, seconds if device == "cuda" else (time.process_time() - worked) / share)
    torch.set_num_threads(before)
    return max(best, 1e-9)


def _where(config: Config) -> tuple[str, str]:
    """The device and the precision it would run in here; as near as this machine can come to it."""
    try:
        device = pick_device(config)
        return device.type, pick_precision(config, device)
    except UserError:
        return "cpu", "fp32"


def _without_seed(config: Config) -> Config:
    return config.model_copy(update={"seed": 0, "name": "any"})


def _tokens(split: Split | None, documents: int | None) -> float:
    """Of the first documents of a split, by its mean; None = all."""
    if split is None:
        return 0.0
    return split.tokens * min(documents or split.documents, split.documents) / split.documents
