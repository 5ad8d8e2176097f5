"""The loop: batch -> loss -> update, and what happens around it at its intervals."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from pkm import dist
from pkm.ahead import Ahead, Batch
from pkm.config import Config
from pkm.console import Clock, duration, log_line, peak_memory, progress, start_line, valid_line
from pkm.corpus.batches import TrainingBatches
from pkm.corpus.store import Corpus
from pkm.count import flops
from pkm.errors import UserError
from pkm.evaluate import evaluate, recording, scored_tokens
from pkm.loaded import Loaded
from pkm.memory.usage import UsageMeter
from pkm.model import Transformer
from pkm.optim import LossScale, Optimizers
from pkm.parallel import autocast, average_statistics, distribute, last_only, peak_flops, pick_precision
from pkm.profiler import profiled
from pkm.run import Run
from pkm.shards import total_bytes

SLOW_DISK = 200e6
"""Bytes/s: how fast the first save may be, to stop in time for it."""


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

    def count(self, step: int, updated: bool, loss_scale: dict[str, float]) -> None:
        """Step `step` is done, by an update or by skipping it."""
        self.step, self.loss_scale = step, loss_scale
        self.skipped += not updated
        self.skipped_in_a_row = 0 if updated else self.skipped_in_a_row + 1


def restore(run: Run, model: Transformer, optim: Optimizers, corpus: Corpus) -> State:
    """Load the newest checkpoint that verifies into model and optimizers; the state of step 0 if there is none yet."""
    loaded = run.checkpoints.newest()
    if loaded is None:
        with dist.together():
            run.metrics.cut(0)
        return State()
    if loaded.record["corpus"] != corpus.fingerprint:
        raise dist.said_once(
            UserError(
                f"the run began on another corpus ({loaded.record['corpus'][:12]}) than this one ({corpus.fingerprint[:12]})",
                str(corpus.path),
                "point corpus.path at the corpus it began with, or start another run with another name",
            )
        )
    everything = _everything(model, optim)
    with dist.together():
        loaded.copy_into(everything, _columns(model, everything))
        optim.take_up()
        run.metrics.cut(loaded.step)
    return State(**loaded.record["state"])


def load_weights(model: Transformer, loaded: Loaded) -> None:
    """Copy a checkpoint's weights and running statistics into `model`."""
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    with dist.together():
        loaded.copy_into(weights, _columns(model, weights), prefix="model.")


def train(
    config: Config, run: Run, corpus: Corpus, model: Transformer, optim: Optimizers, state: State, stop: dist.StopFlag
) -> State:
    """Go on from `state` to `optim.steps`, or to where the run is told to stop; a checkpoint is left in both cases."""
    steps, device = config.optim.steps, next(model.parameters()).device
    precision = pick_precision(config, device)
    scale = LossScale(active=precision == "fp16")
    scale.load(state.loss_scale or scale.record())
    if corpus.train is None:
        raise UserError(
            "the corpus has no training text", str(corpus.path), "prepare it from sources that are not empty"
        )
    batches = TrainingBatches(corpus.train, config.corpus.context, config.sequences, config.seed)
    spent = dist.seconds_since_torchrun()
    everything = _everything(model, optim)
    save_seconds = total_bytes(everything, _columns(model, everything)) / SLOW_DISK
    evaluation_steps = scored_tokens(config, corpus) / config.optim.batch_tokens
    clock = Clock(state.step, steps, config.max_minutes, spent, save_seconds, evaluation_steps)
    module, rows = distribute(model), dist.share(config.sequences)
    ahead = Ahead(lambda step: batches.slice(step - 1, *rows), device)
    work, peak = flops(config, corpus.vocab.size).training, peak_flops(device, precision)
    model.train()
    run.status("running", state.step)
    run.say(start_line(model, device, precision, state.step))
    if config.max_minutes and spent:
        run.say(f"{duration(spent)} since torchrun began, of max_minutes = {config.max_minutes:g}")
    if dist.world_size() > 1:
        rehearse(config, module, model, ahead.take(state.step + 1), precision)

    for step in progress(run, state.step, steps):
        logs = step % config.log.every_steps == 0 or step in (1, steps)

        # The gradient of the whole batch's mean loss.
        with profiled(config.profile, step, run.directory):
            torch.manual_seed((config.seed * 1_000_003 + step * 1_009 + dist.rank()) % 2**63)
            buffers = [buffer.clone() for buffer in model.buffers()]
            optim.clear()
            sizes = optim.update_sizes() if logs else None
            optim.begin(step)
            loss, meters = backward(config, module, model, ahead.take(step), scale.value, precision, logs)
            optim.sum_over_ranks()
            if scale.active:
                optim.scale_gradients(1 / scale.value)
            norms = optim.gradient_norms()

            # Update, unless something is not finite: then the step leaves no trace but its number.
            finite = all(map(math.isfinite, (loss, *norms.values())))
            if finite:
                optim.step(step, norms)
        if not finite:
            run.say(f"step {step} skipped: loss {loss}, gradient norms {norms}")
            for buffer, saved in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(saved)
        scale.update(overflowed=not finite)
        state.count(step, finite, scale.record())
        if state.skipped_in_a_row >= config.optim.max_skipped:
            raise dist.said_once(
                UserError(
                    f"{state.skipped_in_a_row} steps in a row had a loss or gradient that is not finite; the checkpoints before them stay",
                    f"step {step}",
                    "lower optim.dense.lr or optim.values.lr, warm up longer, or choose precision bf16 or fp32",
                )
            )
        clock.tick(step, config.optim.batch_tokens)

        if logs:
            usages = {str(layer): meter.result() for layer, meter in meters.items() if finite}
            record = {"loss": loss, "lr": optim.learning_rates(step), "gradient_norm": norms, "skipped": state.skipped}
            record["update_size"] = sizes.result() if sizes and finite else {}
            record["memories"] = {
                layer: {"usage": usage.percent, "kl": usage.kl, "output_share": model.memory(int(layer)).output_share()}
                for layer, usage in usages.items()
            }
            speed = {"tokens_per_second": clock.tokens_per_second(), "peak_memory_bytes": peak_memory(device)}
            if peak:
                speed["mfu"] = speed["tokens_per_second"] * work / (peak * dist.world_size())
            run.metrics.write(step, "train", **record, **speed)
            run.say(log_line(step, steps, record, speed, clock.left()))

        improved = False
        if corpus.valid and (step % config.evaluate.every_steps == 0 or step == steps):
            measured = evaluate(model, corpus, corpus.valid, config, config.evaluate.documents)
            improved = measured.loss < state.best_loss
            state.best_loss = min(state.best_loss, measured.loss)
            run.metrics.write(step, "valid", **measured.record())
            run.say(valid_line(step, measured, improved))
            clock.evaluated()

        evaluates = (step + 1) % config.evaluate.every_steps == 0 or step + 1 == steps
        if clock.must_stop(run.checkpoints.longest_seconds, run.checkpoints.saving(), evaluates):
            stop.ask("time limit")
        if run.checkpoints.failed():
            stop.ask("failed save")
        reason = stop.requested(run.directory)
        if reason == "failed save":
            run.checkpoints.wait()  # raises what it failed of, on every rank
        if reason or improved or step % config.checkpoint.every_steps == 0 or step == steps:
            save(run, model, optim, corpus, state, best=improved)
            clock.pause()
        if reason and step < steps:
            run.checkpoints.wait()
            run.status("stopped", step, reason)
            run.say(f"stopped at step {step} ({reason}); the same command goes on from here")
            break

    ahead.close()
    run.checkpoints.wait()
    return state


def backward(
    config: Config,
    module: nn.Module,
    model: Transformer,
    batch: Batch,
    scale: float,
    precision: str,
    measures: bool,
) -> tuple[float, dict[int, UsageMeter]]:
    """Add the gradient of `scale` times the global batch's mean loss to `.grad`, a micro-batch at a time.

    module      what is called: the model, or the model with its gradients summed over ranks
    batch       this rank's inputs and targets, int64 (windows, context)
    measures    also count what the memories read
    Returns the global batch's mean loss, nats per token, and a meter for each layer with a memory (none without `measures`).
    """
    device = next(model.parameters()).device
    inputs, targets = batch
    size = config.optim.micro_batch or len(inputs)
    meters = {n: UsageMeter(m.slots, m.heads) for n, m in model.memories()} if measures else {}
    total = torch.zeros((), device=device)
    for first in range(0, len(inputs), size):
        ids, wanted = (part[first : first + size].to(device, non_blocking=True) for part in (inputs, targets))
        last = first + size >= len(inputs)
        with last_only(module, last), autocast(device, precision), recording(model, measures):
            loss = module(ids, wanted) / config.optim.batch_tokens
            (loss * scale).backward()
        total += loss.detach()
        for layer, meter in meters.items():
            meter.update(*model.memory(layer).selection)
    for meter in meters.values():
        meter.sum_over_ranks()
    average_statistics(model)
    return float(dist.all_reduce(total)), meters


def rehearse(config: Config, module: nn.Module, model: Transformer, batch: Batch, precision: str) -> None:
    """One backward pass that leaves nothing behind.

    After its first one DDP lays out its buckets anew, and with them the order in which more than two ranks are added up:
    a resumed run must take its first step with the layout that the run before it had.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    backward(config, module, model, batch, 1.0, precision, measures=False)
    for buffer, saved in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(saved)


def save(run: Run, model: Transformer, optim: Optimizers, corpus: Corpus, state: State, best: bool) -> None:
    """Write a checkpoint of everything that the next step depends on."""
    everything = _everything(model, optim)
    record = {"state": asdict(state), "corpus": corpus.fingerprint}
    run.checkpoints.save(state.step, everything, record, best, _columns(model, everything))


def _everything(model: Transformer, optim: Optimizers) -> dict[str, Tensor]:
    """All tensors that the next step depends on, themselves and not copies."""
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return weights | {f"optim.{name}": tensor for name, tensor in optim.state_tensors().items()}


def _columns(model: Transformer, tensors: dict[str, Tensor]) -> set[str]:
    """Names of the tensors that the ranks share out by columns: sharded values and what their optimizer keeps of them."""
    tables = [f".blocks.{layer - 1}.memory.values." for layer, memory in model.memories() if memory.sharded]
    return {name for name, tensor in tensors.items() if tensor.ndim == 2 and any(table in name for table in tables)}
