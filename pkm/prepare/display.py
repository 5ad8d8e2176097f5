"""What people see of a preparation: the plan, progress, the summary; and of a corpus: what it holds."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from pkm.corpus.store import SPLITS, Corpus, OtherVocab
from pkm.corpus.unknown import percent, shares, warning
from pkm.files import free_bytes
from pkm.format import printable, roughly, size
from pkm.machine import cores
from pkm.prepare.damage import examples
from pkm.prepare.input.listing import LeftOut, left_out_line
from pkm.prepare.input.sources import Input, needs_unpacking, piece_bytes, pieces_of, units_of
from pkm.prepare.mixture import Taken
from pkm.prepare.near import Near
from pkm.prepare.pipeline import Outcome
from pkm.prepare.settings import PrepareConfig
from pkm.prepare.stage import Progress as StageProgress
from pkm.prepare.stage import Stage

# Measured on one core of a 2-core cloud machine (benchmarks/results/prepare-cpu.md), in bytes of text a second.
READ_RATE, ENCODE_RATE, COUNT_RATE = 11e6, 4e6, 8e6
HTML_RATE = 1.5e6
LEARN_SECONDS = 60
LIBRARY_LEARN_RATE = 4e6
# Text that is left of a page; bytes on disk for each byte of text: articles in between (compressed), ids, chunks.
ARTICLE_SHARE = 0.1
SPOOL_SHARE, IDS_SHARE, CHUNK_SHARE = 0.36, 0.40, 0.36
PLAIN_LINE_SECONDS = 30.0


# Lines of a log are not broken here: whatever shows the log may do that.
LOG_COLUMNS = 10_000


def console_on(stream: TextIO) -> Console:
    """Where a program shows what it does. Off a terminal no line is broken; names are shown as they are, not as markup."""
    terminal = stream.isatty()
    width = None if terminal else LOG_COLUMNS
    return Console(file=stream, width=width, soft_wrap=not terminal, highlight=False, markup=False, emoji=False)


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
        f"{len(inputs):,} files; {tasks:,} tasks, {workers} at a time ({config.executor}): about {roughly(seconds)}, "
        f"{size(disk)} of disk meanwhile, {size(left)} in the end "
        f"({size(free_bytes(config.directory))} are free)"
    )
    if disk > free_bytes(config.directory):
        console.print(f"the disk of {config.directory} may be too small")


def _estimates(inputs: list[Input], workers: int, large: list[Input], config: PrepareConfig) -> tuple[float, int, int]:
    """(seconds, bytes of disk meanwhile, bytes in the end) that a preparation is expected to need."""
    text = sum(file.text_bytes for file in inputs)
    html = sum(file.text_bytes for file in inputs if file.format == "warc")
    seconds = ((text - html) / READ_RATE + html / HTML_RATE + text / ENCODE_RATE) / max(1, workers)
    sample = min(text, config.subwords.sample_megabytes * 2**20)
    if config.counts_words:
        seconds += sample / COUNT_RATE / max(1, workers) + LEARN_SECONDS * min(1, config.subwords.codes / 60000)
    elif config.subwords.learn == "byte-level":
        seconds += sample / LIBRARY_LEARN_RATE
    articles = text - html * (1 - ARTICLE_SHARE)
    disk = articles * (SPOOL_SHARE + IDS_SHARE) + sum(file.text_bytes for file in large) * CHUNK_SHARE
    return seconds, round(disk), round(articles * IDS_SHARE)


@contextmanager
def progress_on(console: Console) -> Iterator[Callable[[Stage, StageProgress], None]]:
    """A function to show progress with: a bar on a terminal; elsewhere a line when a stage begins and ends, and every half
    minute between."""
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[done]}  {task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        shown: dict[str, _Shown] = {}

        def show(stage: Stage, progress: StageProgress) -> None:
            if stage.name not in shown:
                bar = bars.add_task(stage.title, total=sum(stage.costs) or 1, done="", rate="")
                shown[stage.name] = _Shown(bar, time.monotonic(), progress)
            mine, done = shown[stage.name], f"{len(progress.reports):,}/{len(stage.costs):,}"
            if console.is_terminal:
                bars.update(mine.bar, completed=progress.bytes_done, done=done, rate=mine.rate(progress))
            elif line := mine.line(stage, progress):
                console.print(line)

        yield show


@dataclass
class _Shown:
    """A stage as it was when it was first seen in this process, and when its next plain line is due."""

    bar: TaskID
    began: float
    first: StageProgress
    next_line: float = 0.0

    def rate(self, progress: StageProgress) -> str:
        """Words a second since."""
        words, seconds = progress.words - self.first.words, time.monotonic() - self.began
        return f"{words / seconds:,.0f} words/s" if words and seconds > 1 else ""

    def line(self, stage: Stage, progress: StageProgress) -> str | None:
        """The plain line, if it is due."""
        now, total = time.monotonic(), max(1, sum(stage.costs))
        ended = len(progress.reports) == len(stage.costs)
        if now < self.next_line and not (ended and self.next_line < math.inf):
            return None
        self.next_line = math.inf if ended else now + PLAIN_LINE_SECONDS
        met = progress.bytes_done - self.first.bytes_done
        left = f"{roughly((total - progress.bytes_done) * (now - self.began) / met)} left" if met and not ended else ""
        tasks = f"({len(progress.reports):,} of {len(stage.costs):,} tasks)"
        more = "".join(f", {one}" for one in (self.rate(progress), left) if one)
        return f"{stage.title}: {progress.bytes_done / total:.0%} {tasks}{more}"


def show_outcome(outcome: Outcome, seconds: float, console: Console) -> None:
    """Times, speed and memory of every stage."""
    table = Table("stage", "tasks", "words", "seconds of work", "CPU seconds", "words/CPU s", "peak memory of a worker")
    for title, stage in outcome.stages.items():
        cpu = stage["cpu_seconds"]
        rate = f"{stage['words'] / cpu:,.0f}" if cpu > 0 and stage["words"] else ""
        memory = size(stage["peak_kilobytes"] * 1024)
        counts = (f"{stage[key]:,}" for key in ("tasks", "words"))
        table.add_row(title, *counts, f"{stage['seconds']:.1f}", f"{cpu:.1f}", rate, memory)
    console.print(table)
    console.print(f"prepared in {roughly(seconds)}")


def _tokenizer(corpus: Corpus) -> str:
    tokenizer = corpus.manifest["tokenizer"]
    if isinstance(corpus.vocab, OtherVocab) and not tokenizer["library"]:
        return f"text that came as ids, {corpus.vocab.end_id} after each document"
    if isinstance(corpus.vocab, OtherVocab):
        return f"words {corpus.words_are}, ids by tokenizer.json, {tokenizer['end']} ({corpus.vocab.end_id}) after each document"
    return f"Moses tokens, {'escaped, ' if tokenizer['escape'] else ''}{tokenizer['normalize'] or 'not normalized'}"


def show_stats(corpus: Corpus, console: Console) -> None:
    """What a corpus holds, what was dropped on the way and why."""
    manifest = corpus.manifest
    columns = ("split", "documents", "words", "tokens", "tokens a word", "<unk>", "text", "shards", "ids")
    table = Table(*columns, title=str(corpus.path))
    unknown = shares(corpus)
    for name in SPLITS:
        split = manifest["splits"][name]
        disk = split["tokens"] * (2 if manifest["dtype"] == "<u2" else 4)
        ratio = f"{split['tokens'] / split['words']:.3f}" if split["words"] else ""
        counts = (f"{split[key]:,}" for key in ("documents", "words", "tokens"))
        share = percent(unknown[name]) if name in unknown else ""
        table.add_row(name, *counts, ratio, share, size(split["bytes"]), f"{len(split['shards']):,}", size(disk))
    console.print(table)
    console.print(
        f"vocabulary {manifest['vocab_size']:,} in {manifest['dtype'][1:]}, {_tokenizer(corpus)}", highlight=False
    )
    dropped = ", ".join(f"{n:,} {kind.replace('_', ' ')}" for kind, n in manifest["dropped"].items()) or "nothing"
    files = manifest["inputs"]
    console.print(
        f"read {manifest['records']:,} records of {files['files']:,} files ({size(files['bytes'])}); dropped: {dropped}"
    )
    if found := manifest.get("near_duplicates"):
        console.print(Near(found["articles"], found["near_duplicates"]).line())
    for number, one in enumerate(manifest.get("mixture", ())):
        console.print(Taken(**one).line(number))
    if line := left_out_line(manifest.get("left_out", {})):
        console.print(line)
    if named := examples(manifest["named"], "damaged", "too_large"):
        console.print(f"not readable{named}")
    if line := warning(corpus):
        console.print(line)
    console.print(f"fingerprint {corpus.fingerprint}")
