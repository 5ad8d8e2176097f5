"""The loop: batch -> loss -> update, and what happens around it at its intervals."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from pkm import dist
from pkm.config import Config
from pkm.corpus.batches import TrainingBatches
from pkm.corpus.store import Corpus
from pkm.errors import UserError
from pkm.evaluate import Evaluation, evaluate, recording
from pkm.memory.usage import UsageMeter
from pkm.model import Transformer
from pkm.optim import LossScale, Optimizers
from pkm.parallel import autocast, pick_precision
from pkm.run import Run


@dataclass
class State:
    """Where a run stands. Everything else of it is in the model and the optimizers."""

    step: int = 0
    """Updates done, skipped ones included."""
    skipped: int = 0
    """Steps skipped so far because loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    best_loss: float = math.inf
    """Lowest validation loss so far, nats per token."""
    loss_scale: dict[str, float] = field(default_factory=dict)


def restore(run: Run, model: Transformer, optim: Optimizers, corpus: Corpus) -> State:
    """Load the newest checkpoint that verifies into model and optimizers; the state of step 0 if there is none yet."""
    loaded = run.checkpoints.newest()
    if loaded is None:
        run.metrics.cut(0)
        return State()
    if loaded.record["corpus"] != corpus.fingerprint:
        raise UserError(
            f"the run began on another corpus ({loaded.record['corpus'][:12]}) than this one ({corpus.fingerprint[:12]})",
            str(corpus.path),
            "point corpus.path at the corpus it began with, or start another run with another name",
        )
    load_weights(model, loaded.tensors)
    optim.load_state_tensors(_below("optim.", loaded.tensors))
    run.metrics.cut(loaded.step)
    return State(**loaded.record["state"])


def load_weights(model: Transformer, tensors: dict[str, Tensor]) -> None:
    """Copy a checkpoint's `model.*` tensors into `model`."""
    model.load_state_dict(_below("model.", tensors))


def train(
    config: Config, run: Run, corpus: Corpus, model: Transformer, optim: Optimizers, state: State, stop: dist.StopFlag
) -> State:
    """Go on from `state` to `optim.steps`, or to where the run is told to stop; a checkpoint is left in both cases."""
    settings, device = config.optim, next(model.parameters()).device
    dtype = pick_precision(config, device)
    scale = LossScale(active=dtype is torch.float16)
    scale.load(state.loss_scale or scale.record())
    batches = TrainingBatches(corpus.train, config.corpus.context, config.sequences, config.seed)
    clock = Clock(state.step, settings.steps)
    model.train()
    run.status("running", state.step)

    for _ in progress(run, state, settings.steps):
        step = state.step + 1
        logs = step % config.log.every_steps == 0 or step in (1, settings.steps)

        # Forward and backward over this rank's windows, a micro-batch at a time; gradients add up to the whole batch's.
        torch.manual_seed(config.seed * 1_000_003 + step * 1_009 + dist.rank())
        before = [buffer.clone() for buffer in model.buffers()]
        optim.clear()
        inputs, targets = batches.batch(step - 1)
        nll = torch.zeros((), device=device)
        meters = _meters(model) if logs else {}
        for first in range(0, config.sequences, settings.micro_batch or config.sequences):
            rows = slice(first, first + (settings.micro_batch or config.sequences))
            ids, wanted = torch.from_numpy(inputs[rows]).to(device), torch.from_numpy(targets[rows]).to(device)
            with autocast(device, dtype), recording(model, logs):
                part = model(ids, wanted) / targets.size
            (part * scale.value).backward()
            nll += part.detach()
            for layer, meter in meters.items():
                meter.update(*model.memory(layer).selection)
        if scale.value != 1.0:
            optim.scale_gradients(1 / scale.value)

        # Update, unless something is not finite: then the step leaves no trace but its number.
        loss, norms = float(nll), optim.gradient_norms()
        finite = all(map(math.isfinite, (loss, *norms.values())))
        if finite:
            optim.step(step, norms)
            state.skipped_in_a_row = 0
        else:
            for buffer, saved in zip(model.buffers(), before, strict=True):
                buffer.copy_(saved)
            state.skipped, state.skipped_in_a_row = state.skipped + 1, state.skipped_in_a_row + 1
            run.say(f"step {step} skipped: loss {loss}, gradient norms {norms}")
        scale.update(overflowed=not finite)
        state.step, state.loss_scale = step, scale.record()
        if state.skipped_in_a_row >= settings.max_skipped:
            raise UserError(
                f"{state.skipped_in_a_row} steps in a row had a loss or gradient that is not finite; the checkpoints before them stay",
                f"step {step}",
                "lower optim.dense.lr or optim.values.lr, warm up longer, or choose precision bf16 or fp32",
            )

        clock.tick(step, targets.size)
        if logs:
            usages = {layer: meter.result() for layer, meter in meters.items()}
            record = {"loss": loss, "lr": optim.learning_rates(step), "gradient_norm": norms, "skipped": state.skipped}
            record["memories"] = {str(layer): {"usage": u.percent, "kl": u.kl} for layer, u in usages.items()}
            speed = {"tokens_per_second": clock.tokens_per_second(), "peak_memory_bytes": peak_memory(device)}
            run.metrics.write(step, "train", **record, **speed)
            run.say(log_line(step, settings.steps, record, speed, clock.left()))

        improved = False
        if corpus.valid and (step % config.evaluate.every_steps == 0 or step == settings.steps):
            measured = evaluate(model, corpus, corpus.valid, config, config.evaluate.documents)
            improved = measured.loss < state.best_loss
            state.best_loss = min(state.best_loss, measured.loss)
            run.metrics.write(step, "valid", **measured.record())
            run.say(valid_line(step, measured, improved))
            clock.pause()

        reason = stop.requested(run.directory)
        if reason or improved or step % config.checkpoint.every_steps == 0 or step == settings.steps:
            save(run, model, optim, corpus, state, best=improved)
            clock.pause()
        if reason:
            run.status("stopped", step, reason)
            run.say(f"stopped at step {step} ({reason}); the same command goes on from here")
            return state

    return state


def progress(run: Run, state: State, steps: int) -> Iterator[None]:
    """Once for each step to go; on a terminal a bar with the time left stands below the log lines."""
    with Progress(
        TextColumn(run.config.name),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(elapsed_when_finished=False),
        TextColumn("left"),
        console=run.console,
        transient=True,
        disable=not (run.console.is_terminal and dist.is_main()),
    ) as bar:
        task = bar.add_task("train", total=steps, completed=state.step)
        while state.step < steps:
            yield
            bar.update(task, completed=state.step)


def save(run: Run, model: Transformer, optim: Optimizers, corpus: Corpus, state: State, best: bool) -> None:
    """Write a checkpoint of everything that the next step depends on."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"optim.{name}": tensor for name, tensor in optim.state_tensors().items()}
    run.checkpoints.save(state.step, tensors, {"state": asdict(state), "corpus": corpus.fingerprint}, best=best)


class Clock:
    """Tokens per second since the last log line, and the time that is left; evaluations and saves are not counted as training."""

    def __init__(self, step: int, steps: int):
        self.steps, self.started_at, self.step = steps, step, step
        self.seconds = self.interval_seconds = 0.0
        self.interval_tokens = 0
        self.last = time.perf_counter()

    def tick(self, step: int, tokens: int) -> None:
        now = time.perf_counter()
        self.seconds += now - self.last
        self.interval_seconds += now - self.last
        self.interval_tokens += tokens
        self.step, self.last = step, now

    def pause(self) -> None:
        """What happened since the last tick was not training."""
        self.last = time.perf_counter()

    def tokens_per_second(self) -> float:
        """Over the ticks since the last call."""
        speed = self.interval_tokens / max(self.interval_seconds, 1e-9)
        self.interval_tokens, self.interval_seconds = 0, 0.0
        return speed

    def left(self) -> float:
        """Seconds, at the pace so far."""
        return self.seconds / max(self.step - self.started_at, 1) * (self.steps - self.step)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on the GPU, or that the process held on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def log_line(step: int, steps: int, record: dict[str, Any], speed: dict[str, float], seconds_left: float) -> str:
    """One line with all that one looks for while a run goes."""
    both = {key: " / ".join(f"{x:.2e}" for x in record[key].values()) for key in ("lr", "gradient_norm")}
    memories = "".join(
        f" | layer {layer} usage {m['usage']:.1f} % KL {m['kl']:.2f}" for layer, m in record["memories"].items()
    )
    return (
        f"step {step:>{len(str(steps))}}/{steps} | loss {record['loss']:.4f} | lr {both['lr']} | norm {both['gradient_norm']}{memories}"
        f" | {speed['tokens_per_second']:,.0f} tok/s | {speed['peak_memory_bytes'] / 2**30:.2f} GiB | {duration(seconds_left)} left"
    )


def valid_line(step: int, measured: Evaluation, improved: bool) -> str:
    memories = "".join(f" | layer {n} usage {u.percent:.1f} % KL {u.kl:.2f}" for n, u in measured.memories.items())
    best = " | best so far" if improved else ""
    return f"step {step} | valid loss {measured.loss:.4f} | perplexity {measured.perplexity:.2f}{memories}{best}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _meters(model: Transformer) -> dict[int, UsageMeter]:
    return {layer: UsageMeter(memory.slots, memory.heads) for layer, memory in model.memories()}


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
