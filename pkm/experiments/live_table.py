"""What a grid shows while it runs: a live table on a terminal, one line an event anywhere else."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pkm.evaluation.recall import nats_saved, read_facts
from pkm.evaluation.speed import read_speed, seems_measured
from pkm.experiments.estimate import Estimate, Estimator, total
from pkm.experiments.task import Task
from pkm.format import duration, perplexity

OVERALL_SECONDS = 60.0
REFRESH_SECONDS = 0.5
STYLES = {"finished": "green", "failed": "bold red", "stopped": "yellow", "elsewhere": "yellow"}
AT_WORK = ("running", "timing", "asking")
OVER = ("finished", "stopped", "failed", "elsewhere")


class LiveTable:
    """Told of events by the pool; `tick` now and then, to show how things stand."""

    def __init__(self, estimator: Estimator, console: Console | None = None):
        self.estimator = estimator
        self.console = console or Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self.tasks: Sequence[Task] = ()
        self.workers = 1
        self.notes: deque[str] = deque()
        """Said at the next tick: for a signal's handler, which may come in the middle of anything."""
        self._live: Live | None = None
        self._begun = self._last = 0.0

    @contextmanager
    def shown(self, tasks: Sequence[Task], workers: int) -> Iterator[None]:
        """Within it the grid is being run."""
        self.tasks, self.workers = tasks, workers
        self._begun = self._last = time.monotonic()
        before = sum(task.before for task in tasks)
        todo = sum(task.state == "waiting" for task in tasks)
        counts = [f"{before} finished before"] + ([f"{todo} to train, {min(workers, todo)} at a time"] if todo else [])
        untrained = sum(not task.job.trained for task in tasks)
        counts += [f"{untrained} only timed"] if untrained else []
        self.say(f"{len(tasks)} run{'s' * (len(tasks) != 1)}: {', '.join(counts)}")
        if not self.console.is_terminal:
            yield
            return
        with Live(console=self.console, auto_refresh=False, transient=True) as self._live:
            yield
        self._live = None

    def say(self, line: str) -> None:
        self.console.print(line)
        self.console.file.flush()

    def started(self, task: Task) -> None:
        if task.state == "running":
            step = task.job.saved_step()
            goes_on = f", goes on after step {step}" if step else ""
            self.say(f"{self._number(task)} started{goes_on}")

    def ended(self, task: Task) -> None:
        number = self._number(task)
        if task.state == "finished":
            scored = task.result.get("evaluation", {})
            known = "perplexity" in scored
            text = f": perplexity {perplexity(scored['perplexity'], scored.get('loss'))}" if known else ""
            self.say(f"{number} finished{text}")
        elif task.state == "elsewhere":
            self.say(f"{number} running elsewhere: {task.reason}")
        else:
            self.say(f"{number} {task.state}: {task.reason}")

    def timed(self, task: Task) -> None:
        speed = read_speed(task.job.directory) or {}
        self.say(f"{self._number(task)} {speed.get('words_per_second', 0):,.0f} words/s ({speed.get('device')})")

    def asked(self, task: Task) -> None:
        facts = read_facts(task.job.directory) or {}
        nats = nats_saved(facts)
        recall = "" if nats is None else f", recall {nats:.3f} nats a token"
        self.say(f"{self._number(task)} asked for {facts.get('asked', 0):,} facts{recall}")

    def tick(self) -> None:
        while self.notes:
            self.say(self.notes.popleft())
        now = time.monotonic()
        if now - self._last < (REFRESH_SECONDS if self._live else OVERALL_SECONDS):
            return
        self._last = now
        for task in self.tasks:
            if task.state == "running" and task.progress.tokens_per_second:
                self.estimator.learn(task.job.config, task.progress.tokens_per_second)
        if self._live:
            self._live.update(self._picture(), refresh=True)
        else:
            at = [task for task in self.tasks if task.state in AT_WORK]
            self.say(" | ".join([self._overall(), *map(_at, at)]))

    def _number(self, task: Task) -> str:
        width = len(str(len(self.tasks)))
        return f"[{self.tasks.index(task) + 1:>{width}}/{len(self.tasks)}] {task.job.title}"

    def _left(self, task: Task) -> Estimate:
        job = task.job
        whole = self.estimator.of(job, task.progress.step)
        train = whole.train if task.state in ("waiting", "running") else 0.0
        timed = task.state in ("stopped", "failed", "elsewhere") or seems_measured(job.directory, job.trained)
        return Estimate(train, 0.0 if timed else whole.speed, whole.memory, whole.basis)

    def _overall(self) -> str:
        """How far the whole grid is."""
        count = {state: sum(task.state == state for task in self.tasks) for state in OVER}
        parts = [f"{count.pop('finished')} of {len(self.tasks)} finished"]
        parts += [f"{number} {state}" for state, number in count.items() if number]
        left = total([self._left(task) for task in self.tasks], self.workers)
        return f"{', '.join(parts)} | {duration(time.monotonic() - self._begun)} elapsed, about {duration(left)} left"

    def _done(self) -> float:
        """Share of all steps."""
        over = ("finished", "failed", "elsewhere")
        asked = [(task.job.config.optim.steps, task) for task in self.tasks if task.job.trained]
        done = sum(steps if task.state in over else task.progress.step for steps, task in asked)
        return done / sum(steps for steps, _ in asked) if asked else 1.0

    def _picture(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("run", "state", "step", "loss", "tokens/s", "left"):
            table.add_column(name, no_wrap=True, justify="left" if name in ("run", "state") else "right")
        for task in self._worth_showing():
            p, steps = task.progress, task.job.config.optim.steps
            at_work = task.state == "running"
            table.add_row(
                task.job.title,
                Text(task.state, STYLES.get(task.state, "")),
                f"{p.step}/{steps}" if task.job.trained else "",
                "" if p.loss is None else f"{p.loss:.3f}",
                f"{p.tokens_per_second:,.0f}" if at_work and p.tokens_per_second else "",
                duration(self._left(task).train) if at_work else "",
            )
        waiting = sum(task.state == "waiting" for task in self.tasks)
        more = [Text(f"{waiting} more to come", "dim")] if waiting else []
        whole = Table.grid()
        whole.add_row(ProgressBar(total=1.0, completed=self._done(), width=min(self.console.width, 100)))
        whole.add_row(Text(self._overall()))
        return Group(table, *more, whole)

    def _worth_showing(self) -> list[Task]:
        """What is at work, what went wrong, and as many of the others as there is room for."""
        first = [task for task in self.tasks if task.state in (*AT_WORK, "failed", "stopped", "elsewhere")]
        room = max(self.console.height - len(first) - 6, 0)
        finished = [task for task in self.tasks if task.state == "finished" and not task.before]
        shown = {id(task) for task in [*first, *finished[max(len(finished) - room, 0) :]]}
        return [task for task in self.tasks if id(task) in shown][: max(self.console.height - 5, 3)]


def _at(task: Task) -> str:
    if task.state != "running":
        return f"{task.job.title}: {'words a second' if task.state == 'timing' else 'facts'}"
    return f"{task.job.title}: step {task.progress.step}/{task.job.config.optim.steps}"
