"""The loop: take a step, log, validate, stop or save."""

from __future__ import annotations

import numpy as np

from pkm.checkpoint.shards import total_bytes
from pkm.config.rules import cut_short
from pkm.config.schema import Config
from pkm.corpus.batches import TrainingBatches
from pkm.corpus.store import Corpus
from pkm.device import Compute
from pkm.distributed import dist
from pkm.distributed.torchrun import seconds_since_torchrun
from pkm.errors import UserError
from pkm.evaluation.evaluate import evaluate, scored_tokens
from pkm.format import duration
from pkm.model.transformer import Transformer, column_sharded
from pkm.run.run import Run
from pkm.run.stop import REASONS, StopFlag
from pkm.train.clock import Clock
from pkm.train.garbage import collected_at_intervals
from pkm.train.log_lines import log, progress, start_line, valid_line, valid_record
from pkm.train.optim import LossScale, Optimizers, is_known
from pkm.train.parallel import distribute
from pkm.train.prefetch import Prefetcher
from pkm.train.sample import Sampler
from pkm.train.state import State, save, state_tensors
from pkm.train.step import Step, TakenStep, take_step, warm_up_ddp

SLOW_DISK = 200e6
"""Bytes/s: how fast the first save may be, to stop in time for it."""


def train(
    run: Run, compute: Compute, corpus: Corpus, model: Transformer, optim: Optimizers, state: State, stop: StopFlag
) -> State:
    """Go on from `state` to `optim.steps`, or to where the run is told to stop; a checkpoint is left in both cases."""
    config = run.config
    batches = read_ahead(config, corpus, compute)
    clock = start_clock(run, corpus, model, optim, state)
    sampler = Sampler(config, corpus)
    scale = LossScale(compute.precision == "fp16", state.loss_scale, compute.device)
    found = Findings(run, state)
    module = distribute(model)
    model.train()
    run.status("running", state.step)
    run.say(start_line(model, compute, corpus, state.step))
    if short := cut_short(config):
        run.say(short)
    if dist.world_size() > 1:
        warm_up_ddp(config, compute, module, model, batches.take(state.step + 1))

    with batches, collected_at_intervals() as collect:
        for step in progress(run, state.step, config.optim.steps):
            logs = is_due(config, step, config.log.every_steps) or step == 1
            batch, asked = batches.take(step), stop.position(run.directory)
            found.add(take_step(run, compute, module, model, optim, batch, scale, step, logs, asked))
            taken = found.now() if logs else None
            clock.tick(step, config.optim.batch_tokens)
            if taken is not None:
                log(run, compute, corpus, model, optim, state, clock, taken)
            improved = False
            if corpus.valid and is_due(config, step, config.evaluate.every_steps):
                improved = validate(run, compute, corpus, model, optim, state, clock, sampler)
            if stop_or_save(run, compute, corpus, model, optim, state, clock, stop, improved, found):
                break
            collect(step)
    found.now()
    run.checkpoints.wait()
    return state


class Findings:
    """What steps found, read where nobody has to wait for it: a GPU's a step later, unless something depends on it now."""

    def __init__(self, run: Run, state: State):
        self.run, self.state = run, state
        self.awaited: TakenStep | None = None
        self.last: Step | None = None
        self.later = 0
        """Steps between what a rank is asked and what all of them know: 0 where they ask each other."""

    def add(self, given: TakenStep) -> None:
        """Step `given` was given to the device; the one before it is counted."""
        self.now()
        self.state.step, self.awaited = given.step, given
        if is_known(given.numbers):
            self.now()
        elif dist.world_size() > 1:
            self.later = 2  # told with the next step's loss, read a step after that

    def asked(self) -> str | None:
        """Why any rank was asked to stop (one of REASONS); the same on every rank, that asks at the same step."""
        return REASONS[self.last.asked] if self.last is not None else None

    def now(self) -> Step | None:
        """Count the step that was given last, and what it found; UserError on every rank if too many in a row were skipped."""
        if self.awaited is not None:
            self.last, self.awaited = self.awaited.result(), None
            self.state.count(self.last.finite, self.last.loss_scale)
            if not self.last.finite:
                step, loss, norms = self.last.step, self.last.loss, self.last.norms
                self.run.say(f"step {step} skipped: loss {loss}, gradient norms {norms}")
            refuse_to_skip_for_ever(self.run.config, self.state)
        return self.last


def is_due(config: Config, step: int, every_steps: int) -> bool:
    """What happens every so many steps, and after the last."""
    return step % every_steps == 0 or step == config.optim.steps


def read_ahead(config: Config, corpus: Corpus, compute: Compute) -> Prefetcher:
    """This rank's rows of the global batch of each step; UserError without training text."""
    if corpus.train is None:
        fix = "prepare it from sources that are not empty"
        raise UserError("the corpus has no training text", str(corpus.path), fix)
    batches = TrainingBatches(corpus.train, config.corpus.context, config.sequences, config.seed)
    rows = dist.share(config.sequences)
    documents = config.model.document_mask

    def read(step: int) -> tuple[np.ndarray, ...]:
        return (*batches.slice(step - 1, *rows), *((batches.documents(step - 1, *rows),) if documents else ()))

    return Prefetcher(read, compute.device)


def start_clock(run: Run, corpus: Corpus, model: Transformer, optim: Optimizers, state: State) -> Clock:
    """The clock of `max_minutes`, which torchrun may have started, with what a first save and evaluation may take."""
    config, everything, spent = run.config, state_tensors(model, optim), seconds_since_torchrun()
    if config.max_minutes and spent:
        run.say(f"{duration(spent)} since torchrun began, of max_minutes = {config.max_minutes:g}")
    return Clock(
        state.step,
        config.optim.steps,
        config.max_minutes,
        spent=spent,
        save_seconds=total_bytes(everything, column_sharded(model, everything)) / SLOW_DISK,
        evaluation_steps=scored_tokens(config, corpus) / config.optim.batch_tokens,
    )


def refuse_to_skip_for_ever(config: Config, state: State) -> None:
    """UserError on every rank if too many steps in a row moved nothing, or at the end of a run all did: nothing was trained."""
    never = state.skipped == state.step == config.optim.steps
    if never or state.skipped_in_a_row >= config.optim.max_consecutive_skips:
        many = f"all {state.step} steps of the run" if never else f"{state.skipped_in_a_row} steps in a row"
        what = f"{many} had a loss or gradient that is not finite"
        what += "; nothing was learned" if state.skipped == state.step else "; the checkpoints before them stay"
        fix = "lower optim.dense.lr or optim.values.lr, warm up longer, lower the weights of additional losses "
        fix += "(optim.z_loss, say), or choose precision bf16 or fp32"
        raise dist.raised_by_rank_0(UserError(what, f"step {state.step}", fix))


def validate(
    run: Run, compute: Compute, corpus: Corpus, model: Transformer, optim: Optimizers, state: State, clock: Clock,
    sampler: Sampler,
) -> bool:  # fmt: skip
    """Score the validation split, and write a sample; whether the loss is the lowest so far."""
    assert corpus.valid is not None
    measured = evaluate(model, corpus, corpus.valid, run.config, compute, run.config.evaluate.documents)
    improved = measured.loss < state.best_loss
    state.best_loss = min(state.best_loss, measured.loss)
    unread = optim.never_read()
    never_read = {layer: unread[id(memory.values)] for layer, memory in model.memories()}
    sample = sampler.write(model, compute)
    run.metrics.write(state.step, "valid", **valid_record(measured, never_read, sample))
    run.say(valid_line(state.step, measured, improved, never_read))
    clock.evaluated()
    return improved


def stop_or_save(
    run: Run, compute: Compute, corpus: Corpus, model: Transformer, optim: Optimizers, state: State, clock: Clock,
    stop: StopFlag, improved: bool, found: Findings,
) -> bool:  # fmt: skip
    """Save where it is time for it; whether the run is told to stop, which it is only with a checkpoint of this step.

    Raises, on every rank, what a save in the background failed of.
    """
    config, step, saves = run.config, state.step, run.checkpoints
    evaluates_next = any(is_due(config, step + 1 + i, config.evaluate.every_steps) for i in range(1 + found.later))
    if clock.must_stop(saves.longest_seconds, saves.saving(), evaluates_next, 2 + found.later):
        stop.ask("time limit")
    if saves.failed():
        stop.ask("failed save")
    # GPUs tell each other with the loss, so that no rank waits for another one's CPU.
    reason = found.asked() if found.later else stop.requested(run.directory)
    if reason == "failed save":
        saves.wait()
    if reason or improved or is_due(config, step, config.checkpoint.every_steps):
        found.now()
        save(run, compute, model, optim, corpus, state, best=improved)
        clock.pause()
    if reason is None or step == config.optim.steps:
        return False
    saves.wait()
    run.status("stopped", step, reason)
    run.say(f"stopped at step {step} ({reason}); the same command goes on from here")
    return True
