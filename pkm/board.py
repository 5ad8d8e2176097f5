"""What a grid shows while it runs: a live table on a terminal, one line an event anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pkm.console import duration
from pkm.experiments import Task

OVERALL_SECONDS = 60.0
REFRESH_SECONDS = 0.5
STYLES = {"finished": "green", "failed": "bold red", "stopped": "yellow", "elsewhere": "yellow", "waiting": "dim"}


class Board:
    def __init__(self, console: Console | None = None):
        self.console = console or Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self.tasks: Sequence[Task] = ()
        self._live: Live | None = None
        self._last = 0.0
        self._begun = time.monotonic()

    @contextmanager
    def shown(self, tasks: Sequence[Task], workers: int) -> Iterator[None]:
        self.tasks = tasks
        self._begun = self._last = time.monotonic()
        before = sum(task.before for task in tasks)
        todo = len(tasks) - before
        self.say(f"{len(tasks)} runs: {before} finished before, {todo} to go, {workers} at a time")
        if not self.console.is_terminal or not todo:
            yield
            return
        with Live(console=self.console, auto_refresh=False, transient=True) as self._live:
            yield
        self._live = None

    def say(self, line: str) -> None:
        self.console.print(line)
        self.console.file.flush()

    def started(self, task: Task) -> None:
        if task.state == "timing":
            self.say(f"{self._number(task)} words a second")
        else:
            goes_on = f", goes on after step {task.progress.step}" if task.progress.step else ""
            self.say(f"{self._number(task)} started{goes_on}")

    def ended(self, task: Task) -> None:
        number = self._number(task)
        if task.state == "finished":
            scored = task.result.get("evaluation", {}).get("perplexity")
            self.say(f"{number} finished" + (f": perplexity {scored:.2f}" if scored else ""))
        elif task.state == "elsewhere":
            self.say(f"{number} running elsewhere: {task.reason}")
        else:
            self.say(f"{number} {task.state}: {task.reason}")

    def timed(self, task: Task) -> None:
        return

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._last < (REFRESH_SECONDS if self._live else OVERALL_SECONDS):
            return
        self._last = now
        if self._live:
            self._live.update(self._picture(), refresh=True)
        else:
            self.say(self._overall())

    def _number(self, task: Task) -> str:
        width = len(str(len(self.tasks)))
        return f"[{self.tasks.index(task) + 1:>{width}}/{len(self.tasks)}] {task.job.title}"

    def _overall(self) -> str:
        done = sum(task.state == "finished" for task in self.tasks)
        running = [task for task in self.tasks if task.state == "running"]
        at = ", ".join(f"{t.job.title} {t.progress.step}/{t.job.config.optim.steps}" for t in running)
        return f"{done} of {len(self.tasks)} finished after {duration(time.monotonic() - self._begun)}; running: {at}"

    def _picture(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for name in ("run", "state", "step", "loss", "tokens/s"):
            table.add_column(name, no_wrap=True)
        for task in self.tasks:
            if task.state in ("running", "timing", "failed"):
                p = task.progress
                table.add_row(
                    task.job.title,
                    Text(task.state, STYLES.get(task.state, "")),
                    f"{p.step}/{task.job.config.optim.steps}",
                    "" if p.loss is None else f"{p.loss:.3f}",
                    f"{p.tokens_per_second:,.0f}" if p.tokens_per_second else "",
                )
        done = sum(task.state == "finished" for task in self.tasks)
        return Group(table, ProgressBar(total=len(self.tasks), completed=done), Text(self._overall()))
