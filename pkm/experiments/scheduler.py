"""Runs a grid on this machine: one run on each worker at a time; then measures their words per second one by one, and asks them
for facts.

Whatever ends it, the same call goes on: a run that is told to stop saves first, and what is finished is not run again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from pkm import files
from pkm.evaluation.recall import is_asked
from pkm.evaluation.speed import ROUNDS, SECONDS, measured_here
from pkm.experiments.jobs import Job
from pkm.experiments.live_table import LiveTable
from pkm.experiments.task import State, Task
from pkm.experiments.workers import RunProcess, Worker, facts_command, speed_command, train_command
from pkm.run.lock import lock_holder
from pkm.run.status import mark_failed, read_status

POLL_SECONDS = 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Scheduler:
    """tasks[i] is what became of jobs[i]."""

    def __init__(self, jobs: Sequence[Job], workers: Sequence[Worker], board: LiveTable, time_again: bool = False):
        self.tasks = [Task(job) for job in jobs]
        self.workers, self.board, self.time_again = list(workers), board, time_again
        self.stopped_by: str | None = None
        """The signal that ended it."""
        self._signals = 0
        self._children: list[tuple[Task, RunProcess]] = []

    def run(self) -> None:
        """Train what is not finished, measure and ask for facts where that is not done. Nothing is raised for a run that fails."""
        for task in self.tasks:
            if not task.job.trained or task.job.is_finished():
                task.state, task.before = "finished", task.job.trained
                task.take_report()
            else:
                task.look()
        with self._signals_heard(), self.board.shown(self.tasks, len(self.workers)):
            self._train()
            if not self._signals:
                self._time()
            if not self._signals:
                self._ask()

    @property
    def failed(self) -> list[Task]:
        return [task for task in self.tasks if task.state == "failed"]

    def _train(self) -> None:
        def start(task: Task, worker: Worker) -> None:
            self._start(task, "running", worker, train_command(task.job, worker.ranks), "output.txt")

        self._side_by_side(self.workers, self._next, start, self._trained)

    def _side_by_side(
        self,
        workers: Sequence[Worker],
        following: Callable[[], Task | None],
        start: Callable[[Task, Worker], None],
        ended: Callable[[Task, RunProcess], None],
    ) -> None:
        """Start what follows on every worker that is free, until nothing does or a signal came, and all have ended."""
        free = list(workers)
        while True:
            while free and not self._signals and (task := following()) is not None:
                start(task, free.pop(0))
            if not self._children:
                break
            for task, child in self._wait():
                free.append(child.worker)
                ended(task, child)

    def _next(self) -> Task | None:
        """The next run that no other process is working on."""
        for task in self.tasks:
            if task.state in ("waiting", "elsewhere"):
                holder = lock_holder(task.job.directory / "lock")
                if holder is None and task.state == "elsewhere" and task.job.is_finished():
                    self._finish(task)  # another process finished it
                elif holder is None:
                    return task
                elif task.state == "waiting":
                    self._end(task, "elsewhere", holder)
        return None

    def _start(self, task: Task, state: State, worker: Worker, command: list[str], output: str) -> None:
        task.state = state
        with files.explained(task.job.directory):
            child = RunProcess(task.job, worker, command, task.job.directory / output)
        self._children.append((task, child))
        self.board.started(task)

    def _wait(self) -> Iterator[tuple[Task, RunProcess]]:
        """The children that ended meanwhile; those that go on are told of signals that came."""
        time.sleep(POLL_SECONDS)
        for task, child in list(self._children):
            if self._signals:
                child.ask_to_stop()
            if self._signals > 1:
                child.kill()
            task.look()
            if child.ended():
                self._children.remove((task, child))
                yield task, child
        self.board.tick()

    def _trained(self, task: Task, child: RunProcess) -> None:
        job, code = task.job, child.process.returncode
        if job.is_finished():
            self._finish(task)
        elif code == 0:
            status = read_status(job.directory)
            self._end(task, "stopped", f"{status.get('reason')}, at step {status.get('step')}")
        elif child.asked:
            saved = "before it could save" if task.progress.step == 0 else "goes on from its last save"
            self._end(task, "stopped", saved)
        elif (holder := lock_holder(job.directory / "lock")) is not None:
            self._end(task, "elsewhere", holder)
        else:
            reason = child.reason()
            mark_failed(job.directory, reason)
            self._end(task, "failed", reason)

    def _time(self) -> None:
        """Words a second of each cell that a table shows them of, with nothing else at work: in rounds over all of them."""
        tasks = [task for task in self.tasks if task.job.timed and task.state == "finished"]
        tasks = [t for t in tasks if self.time_again or not measured_here(t.job.config, t.job.trained)]
        if tasks and any(other.state == "elsewhere" for other in self.tasks):
            self.board.say("words a second are not measured beside runs elsewhere; the same command does it later")
            return
        for number in range(ROUNDS):
            for task in tasks:
                if not self._signals and task.state == "finished":
                    self._time_once(task, number)

    def _time_once(self, task: Task, number: int) -> None:
        """Round `number`, from 0, of one cell."""
        worker = Worker(self.workers[0].gpus[:1], self.workers[0].cores)
        options = ["--quiet", "--seconds", str(SECONDS / ROUNDS), *(["--again"] if number else [])]
        self._start(task, "timing", worker, [*speed_command(task.job), *options], "speed.txt")
        while self._children:
            for ended, child in self._wait():
                if self._measured(ended, child, "words a second") and number == ROUNDS - 1:
                    self.board.timed(ended)

    def _ask(self) -> None:
        """For facts, each cell that a table shows its recall of; one process each, whatever ranks it was trained on."""
        tasks = [task for task in self.tasks if task.job.recall and task.state == "finished"]
        left = iter([task for task in tasks if not is_asked(task.job.directory)])

        def start(task: Task, worker: Worker) -> None:
            self._start(task, "asking", worker, facts_command(task.job), "facts.txt")

        def ended(task: Task, child: RunProcess) -> None:
            if self._measured(task, child, "recall"):
                self.board.asked(task)

        alone = [Worker(worker.gpus[:1], worker.cores) for worker in self.workers]
        self._side_by_side(alone, lambda: next(left, None), start, ended)

    def _measured(self, task: Task, child: RunProcess, what: str) -> bool:
        """Take a measurement's end; whether it went well."""
        well = child.process.returncode == 0
        if well or child.asked:
            task.state = "finished"
        else:
            self._end(task, "failed", f"{what}: {child.reason()}")
        child.output.unlink(missing_ok=True)
        return well

    def _finish(self, task: Task) -> None:
        task.take_report()
        self._end(task, "finished")

    def _end(self, task: Task, state: State, reason: str = "") -> None:
        task.state, task.reason = state, reason
        self.board.ended(task)

    @contextmanager
    def _signals_heard(self) -> Iterator[None]:
        def hear(number: int, frame: FrameType | None) -> None:
            self._signals += 1
            self.stopped_by = signal.Signals(number).name
            first = f"{self.stopped_by}: every run saves, then stops; a second one kills them"
            self.board.notes.append(first if self._signals == 1 else "killing the runs")

        previous = {number: signal.signal(number, hear) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
