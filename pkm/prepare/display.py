"""What people see of a preparation: the plan, progress, the summary; and of a corpus: what it holds."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pkm.corpus.store import SPLITS, Corpus
from pkm.corpus.unknown import percent, shares, warning
from pkm.files import free_bytes
from pkm.format import printable
from pkm.machine import cores
from pkm.prepare.damage import examples
from pkm.prepare.input.listing import LeftOut, left_out_line
from pkm.prepare.input.sources import Input, needs_unpacking, piece_bytes, pieces_of, units_of
from pkm.prepare.pipeline import Outcome
from pkm.prepare.settings import PrepareConfig
from pkm.prepare.stage import Progress as StageProgress
from pkm.prepare.stage import Stage

# Measured on one core of a 2-core cloud machine (benchmarks/results/prepare-cpu.md), in bytes of text a second.
READ_RATE, ENCODE_RATE, COUNT_RATE = 11e6, 4e6, 8e6
HTML_RATE = 1.5e6
LEARN_SECONDS = 60
# Text that is left of a page; bytes on disk for each byte of text: articles in between (compressed), ids, chunks.
ARTICLE_SHARE = 0.1
SPOOL_SHARE, IDS_SHARE, CHUNK_SHARE = 0.36, 0.40, 0.36
PLAIN_LINE_SECONDS = 30.0


# A log is not a terminal: whatever reads it breaks its lines, or none does.
LOG_COLUMNS = 10_000


def console_on(stream: TextIO) -> Console:
    """Where a program shows what it does. Off a terminal no line is broken; names are shown as they are, not as markup."""
    terminal = stream.isatty()
    return Console(
        file=stream,
        width=None if terminal else LOG_COLUMNS,
        soft_wrap=not terminal,
        highlight=False,
        markup=False,
        emoji=False,
    )


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def show_plan(config: PrepareConfig, inputs: list[Input], left_out: LeftOut, console: Console) -> None:
    """Files, what is left out, sizes, and about how long it will take and how much disk it will need."""
    table = Table("source", "format", "files", "size", "text, about", title=f"plan: {config.directory}")
    kinds: dict[tuple[str, str], list[Input]] = defaultdict(list)
    for file in inputs:
        packed = f" ({file.compression})" if file.compression else ""
        kinds[file.url.rpartition("/")[0] or ".", file.format + packed].append(file)
    for (folder, kind), files in kinds.items():
        total, text = sum(file.size for file in files), sum(file.text_bytes for file in files)
        table.add_row(printable(folder), kind, f"{len(files):,}", size(total), size(text))
    console.print(table)
    if line := left_out.line():
        console.print(line)
    target = piece_bytes(inputs)
    large = [file for file in inputs if needs_unpacking(file, target)]
    tasks = sum(1 for _ in units_of((p for f in inputs if f not in large for p in pieces_of(f, target)), target))
    tasks += sum(-(-file.text_bytes // target) for file in large)
    workers = min(tasks, config.workers or (cores() if config.executor == "local" else tasks))
    seconds, disk, left = _estimates(inputs, workers, large, config)
    console.print(
        f"{len(inputs):,} files; {tasks:,} tasks, {workers} at a time ({config.executor}): about {duration(seconds)}, "
        f"{size(disk)} of disk meanwhile, {size(left)} in the end "
        f"({size(free_bytes(config.directory))} are free)"
    )
    if disk > free_bytes(config.directory):
        console.print(f"the disk of {config.directory} may be too small")


def _estimates(
    inputs: list[Input], workers: int, large: list[Input], config: PrepareConfig
) -> tuple[float, float, float]:
    """(seconds, bytes of disk meanwhile, bytes in the end) that a preparation is expected to need."""
    text = sum(file.text_bytes for file in inputs)
    html = sum(file.text_bytes for file in inputs if file.format == "warc")
    seconds = ((text - html) / READ_RATE + html / HTML_RATE + text / ENCODE_RATE) / max(1, workers)
    if config.subwords.codes_file is None:
        sample = min(text, config.subwords.sample_megabytes * 2**20)
        seconds += sample / COUNT_RATE / max(1, workers) + LEARN_SECONDS * min(1, config.subwords.codes / 60000)
    articles = text - html * (1 - ARTICLE_SHARE)
    disk = articles * (SPOOL_SHARE + IDS_SHARE) + sum(file.text_bytes for file in large) * CHUNK_SHARE
    return seconds, disk, articles * IDS_SHARE


@contextmanager
def progress_on(console: Console) -> Iterator[Callable[[Stage, StageProgress], None]]:
    """A function to show progress with: a bar on a terminal, now and then a plain line elsewhere."""
    if not console.is_terminal:
        yield _PlainProgress(console).show
        return
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[done]}  {task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        known: dict[str, Any] = {}
        meter = _Meter()

        def show(stage: Stage, progress: StageProgress) -> None:
            if stage.name not in known:
                known[stage.name] = bars.add_task(stage.title, total=sum(stage.costs) or 1, done="", rate="")
            done = f"{len(progress.reports):,}/{len(stage.costs):,}"
            bars.update(known[stage.name], completed=progress.bytes_done, done=done, rate=meter.rate(stage, progress))

        yield show


class _Meter:
    """Words a second since a stage was first seen in this process."""

    def __init__(self) -> None:
        self._began: dict[str, tuple[float, int]] = {}

    def rate(self, stage: Stage, progress: StageProgress) -> str:
        now = time.monotonic()
        began, words = self._began.setdefault(stage.name, (now, progress.words))
        met = progress.words - words
        return f"{met / (now - began):,.0f} words/s" if met and now > began + 1 else ""


class _PlainProgress:
    """A line when a stage begins and ends, and every half minute between."""

    def __init__(self, console: Console):
        self._console, self._meter = console, _Meter()
        self._next: dict[str, float] = {}
        self._began: dict[str, tuple[float, float]] = {}

    def show(self, stage: Stage, progress: StageProgress) -> None:
        now, total = time.monotonic(), max(1, sum(stage.costs))
        ended = len(progress.reports) == len(stage.costs)
        began, before = self._began.setdefault(stage.name, (now, progress.bytes_done))
        if now < self._next.get(stage.name, 0) and not (ended and self._next[stage.name] < math.inf):
            return
        self._next[stage.name] = math.inf if ended else now + PLAIN_LINE_SECONDS
        left = ""
        if not ended and progress.bytes_done > before:
            pace = (progress.bytes_done - before) / (now - began)
            left = f", {duration((total - progress.bytes_done) / pace)} left"
        rate = self._meter.rate(stage, progress)
        self._console.print(
            f"{stage.title}: {progress.bytes_done / total:.0%} ({len(progress.reports):,} of {len(stage.costs):,} tasks)"
            f"{', ' + rate if rate else ''}{left}"
        )


def show_outcome(outcome: Outcome, seconds: float, console: Console) -> None:
    """Times, speed and memory of every stage."""
    table = Table("stage", "tasks", "words", "seconds of work", "CPU seconds", "words/CPU s", "peak memory of a worker")
    for title, stage in outcome.stages.items():
        cpu = stage["cpu_seconds"]
        rate = f"{stage['words'] / cpu:,.0f}" if cpu > 0 and stage["words"] else ""
        memory = size(stage["peak_kilobytes"] * 1024)
        table.add_row(
            title, f"{stage['tasks']:,}", f"{stage['words']:,}", f"{stage['seconds']:.1f}", f"{cpu:.1f}", rate, memory
        )
    console.print(table)
    console.print(f"prepared in {duration(seconds)}")


def show_stats(corpus: Corpus, console: Console) -> None:
    """What a corpus holds, what was dropped on the way and why."""
    manifest = corpus.manifest
    table = Table(
        "split",
        "documents",
        "words",
        "tokens",
        "tokens a word",
        "<unk>",
        "text",
        "shards",
        "ids",
        title=str(corpus.path),
    )
    unknown = shares(corpus)
    for name in SPLITS:
        split = manifest["splits"][name]
        disk = split["tokens"] * (2 if manifest["dtype"] == "<u2" else 4)
        ratio = f"{split['tokens'] / split['words']:.3f}" if split["words"] else ""
        counts = (f"{split[key]:,}" for key in ("documents", "words", "tokens"))
        share = percent(unknown[name]) if name in unknown else ""
        table.add_row(name, *counts, ratio, share, size(split["bytes"]), f"{len(split['shards']):,}", size(disk))
    console.print(table)
    tokenizer = manifest["tokenizer"]
    chain = f"{'escaped, ' if tokenizer['escape'] else ''}{tokenizer['normalize'] or 'not normalized'}"
    console.print(
        f"vocabulary {manifest['vocab_size']:,} in {manifest['dtype'][1:]}, Moses tokens, {chain}", highlight=False
    )
    dropped = ", ".join(f"{n:,} {kind.replace('_', ' ')}" for kind, n in manifest["dropped"].items()) or "nothing"
    files = manifest["inputs"]
    console.print(
        f"read {manifest['records']:,} records of {files['files']:,} files ({size(files['bytes'])}); dropped: {dropped}"
    )
    if line := left_out_line(manifest.get("left_out", {})):
        console.print(line)
    if named := examples(manifest["named"], "damaged", "too_large"):
        console.print(f"not readable{named}")
    if line := warning(corpus):
        console.print(line)
    console.print(f"fingerprint {corpus.fingerprint}")
