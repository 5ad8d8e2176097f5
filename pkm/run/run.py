"""A run's directory: who holds its lock, the settings it began with, its status and its log.

runs/NAME/config.yaml      the settings it began with, complete
          status.json      running | stopped | finished | failed, at which step, why
          lock             who is at work on it
          log.txt          what the terminal showed
          metrics.jsonl, tensorboard/, checkpoints/
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NoReturn

from rich.console import Console

from pkm import files
from pkm.checkpoint.checkpoints import Checkpoints
from pkm.config.schema import Config
from pkm.distributed import dist
from pkm.distributed.watchdog import RankWatchdog
from pkm.errors import EXIT_USER_ERROR, ReportedByOtherRank, UserError
from pkm.run import metrics
from pkm.run.changes import refuse_changes
from pkm.run.lock import Lock
from pkm.run.metrics import Metrics
from pkm.run.services import Forwarder, build_services
from pkm.run.status import STOP_FILE, State, newest_checkpoint, read_report, read_status, write_status
from pkm.run.stop import Stopped


class Run:
    """An open run; close it by leaving its `with` block. All ranks open it, rank 0 writes."""

    def __init__(self, config: Config):
        self.config = config
        self.directory = config.directory
        self.console = Console(file=sys.stdout, soft_wrap=True, highlight=False, markup=False, emoji=False)
        forwarders = [Forwarder(service, self.directory, config, self.say) for service in build_services(config)]
        self.metrics = Metrics(self.directory, config.log.tensorboard, self.is_ours, forwarders)
        save = config.checkpoint
        where, ours = self.directory / "checkpoints", self.refuse_if_taken_over
        self.checkpoints = Checkpoints(where, save.keep, self._warn, self.metrics.sync, save.in_background, ours)
        self._lock = Lock(self.directory / "lock", self._taken_over)
        self._peers = RankWatchdog(self._end_with)
        self._found: dict[str, Any] = {}
        self._changed: str | None = None
        self._reported = False

    @classmethod
    def open(cls, config: Config, resolved_yaml: str) -> Run:
        """Create the directory of a run, or open the one that is there, and lock it.

        resolved_yaml    the config, complete, as it is written into a new run

        UserError if the directory cannot be written, a living process is at work on it, or it began with settings that
        may not change (the keys are named with both values).
        """
        run = cls(config)
        with dist.raise_on_all_ranks():
            if dist.is_main():
                with files.explained(run.directory):
                    run.directory.mkdir(parents=True, exist_ok=True)
                run._lock.acquire(run.say)
                try:
                    run._found = read_status(run.directory)
                    run._take_up(resolved_yaml)
                except BaseException:
                    run._lock.release()
                    raise
        there = (run._found, read_report(run.directory) is not None, run._lock.token)
        run._found, run._reported, run._lock.token = dist.broadcast_object(there)
        if unwatched := run._peers.watch():
            ranks = ", ".join(map(str, unwatched))
            run._warn(f"no connection between rank 0 and these ranks: {ranks}. The others may not notice if one dies")
        return run

    def _take_up(self, resolved_yaml: str) -> None:
        for leftover in self.directory.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        path = self.directory / "config.yaml"
        if path.exists() and not self._failed_before_it_began():
            changed = refuse_changes(path, self.config)
            if changed:
                self.say("settings changed since this run began: " + ", ".join(changed))
            if self._found.get("state") == "finished" and self._found["step"] < self.config.optim.steps:
                # optim.steps was raised: from now on it is not finished, whatever happens.
                write_status(self.directory, "running", self._found["step"], None)
            if path.read_bytes() == resolved_yaml.encode():
                return
        elif self.checkpoints.steps():
            what = "there are checkpoints but no settings, so nobody can tell whether they fit"
            raise UserError(what, str(path), "bring config.yaml back, or give this run another name")
        self._changed = resolved_yaml
        if not self.checkpoints.steps():
            self.keep_settings()

    def keep_settings(self) -> None:
        """Write the changed settings of a run that goes on; called once its checkpoint was found to fit them.

        Before, config.yaml would say of the checkpoints what is not so, and the old settings would be refused from then on.
        """
        if self._changed is not None:
            files.atomic_write(self.directory / "config.yaml", self._changed)
            self._changed = None

    def _failed_before_it_began(self) -> bool:
        """Whether nothing came of it but an error: it was refused before its first step, and any settings may stand there."""
        said = self._found
        nothing = said.get("state") == "failed" and said.get("step") == 0 and newest_checkpoint(said) == 0
        return nothing and not self.checkpoints.steps() and not any(metrics.read(self.directory / metrics.FILE))

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._peers.ending()
        lost = dist.loss_of_rank(error)
        if error is not None and not isinstance(error, SystemExit | ReportedByOtherRank):
            # The disk may be full: that must not hide the error itself.
            with suppress(OSError, UserError):
                self._fail(error, lost)
        if isinstance(error, UserError):
            with suppress(UserError, RuntimeError):
                self.checkpoints.wait()
        with suppress(OSError):
            stopped = read_status(self.directory).get("state") == "stopped"
            self.metrics.finish("failed" if error is not None else "stopped" if stopped else "finished")
        self._lock.release()
        self._peers.leave(goodbye=error is None)
        if lost:
            raise self._ends_with(lost) from error

    def _ends_with(self, lost: str) -> UserError:
        what = f"another rank has ended, and this one ends with it: {read_status(self.directory).get('reason', lost)}"
        fix = "read that rank's message, here or in log.txt; the same command goes on from the newest checkpoint"
        return UserError(what, str(self.directory), fix)

    def _end_with(self, lost: str) -> NoReturn:
        """End the process from the watchdog's thread, because the main thread is blocked in a collective."""
        with suppress(OSError, UserError):
            self._fail(RuntimeError(lost), lost)
        with suppress(OSError):
            self._lock.release()
        print(f"error: {self._ends_with(lost)}", file=sys.stderr, flush=True)
        os._exit(EXIT_USER_ERROR)

    def is_ours(self) -> bool:
        """Whether the directory is this process's to write in: False once another one took the lock over."""
        return self._lock.taken_over_by() is None

    def refuse_if_taken_over(self) -> None:
        """UserError if another process took the run over: from then on this one writes nothing in its directory.

        It may be that the two started together where the file system did not keep them apart, or that this one was long
        asleep.
        """
        if (by := self._lock.taken_over_by()) is not None:
            fix = "nothing more was written; leave the run to that process, or stop it and give the same command again"
            raise UserError(f"another process took this run over: {by}", str(self.directory), fix)

    def _taken_over(self, by: str) -> None:
        """Called in the lock's thread: asks the main thread to stop, which then fails at its next save."""
        line = f"another process took {self.directory} over: {by}. This one stops and writes nothing more there"
        print(f"warning: {line}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    def _fail(self, error: BaseException, lost: str | None) -> None:
        """Write why the run failed. Any rank may write it: the rank that fails is the only one that knows the reason."""
        if not self.is_ours():
            return
        said = read_status(self.directory)
        over = said.get("state") == "stopped" or (lost and said.get("state") == "failed")
        if said.get("state") == "finished" or (over and said != self._found):
            return
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
        if not isinstance(error, UserError | KeyboardInterrupt):
            reason = f"{type(error).__name__}: {reason}"
        if dist.world_size() > 1:
            reason = f"rank {dist.rank()} " + (f"lost another rank: {lost}" if lost else f"failed: {reason}")
        checkpoint = max(newest_checkpoint(said), self.checkpoints.newest_step)
        write_status(self.directory, "failed", max(said.get("step", 0), self.metrics.last_step), reason, checkpoint)
        self._log(f"failed: {reason}")

    def status(self, state: State, step: int, reason: str | None = None) -> None:
        """Write status.json; rank 0 does. "stopped" says that a checkpoint is written, so the file STOP was obeyed and goes."""
        if dist.is_main() and self.is_ours():
            write_status(self.directory, state, step, reason)
            if state == "stopped":
                (self.directory / STOP_FILE).unlink(missing_ok=True)

    def note_checkpoint(self) -> None:
        """Write into status.json that there is a checkpoint now, so that nobody begins again where it is out of sight."""
        newest = self.checkpoints.newest_step
        if dist.is_main() and self.is_ours() and newest > 0:
            said = read_status(self.directory)
            if said.get("state") == "running" and newest_checkpoint(said) != newest:  # a rank may have failed meanwhile
                write_status(self.directory, "running", newest, None)

    @contextmanager
    def stops_in_report(self, step: int) -> Iterator[None]:
        """Around the report: if it is interrupted, the run is stopped, and the same command writes the report."""
        reason = None
        try:
            yield
        except Stopped as stopped:
            reason = str(stopped)
        except KeyboardInterrupt:
            self.status("stopped", step, "interrupted")
            raise
        if reason is not None:
            self.status("stopped", step, reason)
            self.say(f"stopped before the report was written ({reason}); the same command writes it")

    def refuse_to_begin_again(self) -> None:
        """Called on every rank where no checkpoint was found: UserError if status.json said that one was written."""
        step = newest_checkpoint(self._found)
        if step > 0:
            what = f"there is no checkpoint, and status.json says that one of step {step} was written"
            fix = "see whether that directory was moved or its disk is not mounted; to begin again from step 0, "
            error = UserError(what, str(self.checkpoints.root), f"{fix}move {self.directory} away")
            raise dist.raised_by_rank_0(error)

    def is_finished(self, reports: bool = True) -> bool:
        """Whether the run was complete when it was opened: all steps that the config asks for, and the report.

        reports    False where there is nothing to report on: the corpus has no test split
        """
        done = self._found.get("state") == "finished" and self._found.get("step", 0) >= self.config.optim.steps
        return done and (self._reported or not reports)

    def show_report(self) -> None:
        """Show report.md of a finished run; there is none if its corpus has no test split."""
        self.keep_settings()
        path = self.directory / "report.md"
        with files.explained(path):
            text = path.read_text(encoding="utf-8") if path.exists() else None
        self.say(f"{self.directory} is finished" + (f"; its report is {path}" if text else ""))
        if text:
            self._show(text)

    def say(self, line: str) -> None:
        """Show a line and append it to log.txt; only rank 0 does."""
        if dist.is_main():
            self._show(line)
            self._log(line)

    def _show(self, text: str) -> None:
        if not dist.is_main():
            return
        if self.console.is_terminal:
            self.console.print(text)
        else:
            print(text, flush=True)

    def _log(self, line: str) -> None:
        if not self.is_ours():
            return
        # What must be written reports a full disk; the log may be incomplete.
        with suppress(OSError), (self.directory / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")

    def _warn(self, line: str) -> None:
        self.say(f"warning: {line}")
