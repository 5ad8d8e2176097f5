"""The loop: batch -> loss -> update, and what happens around it at its intervals."""

from __future__ import annotations

import math

import torch

from pkm.checkpoint.shards import total_bytes
from pkm.config.schema import Config
from pkm.corpus.batches import TrainingBatches
from pkm.corpus.store import Corpus
from pkm.device import peak_flops, pick_precision
from pkm.distributed import dist
from pkm.distributed.torchrun import seconds_since_torchrun
from pkm.errors import UserError
from pkm.evaluation.evaluate import evaluate, scored_tokens
from pkm.format import duration
from pkm.machine import peak_memory
from pkm.model.cost import flops
from pkm.model.transformer import Transformer, column_sharded
from pkm.run.run import Run
from pkm.run.stop import StopFlag
from pkm.train.clock import Clock
from pkm.train.gradient import backward, warm_up_ddp
from pkm.train.log_lines import log_line, progress, start_line, valid_line
from pkm.train.optim import LossScale, Optimizers
from pkm.train.parallel import distribute
from pkm.train.prefetch import Prefetcher
from pkm.train.profiler import profiled
from pkm.train.state import State, save, state_tensors

SLOW_DISK = 200e6
"""Bytes/s: how fast the first save may be, to stop in time for it."""


def train(
    config: Config, run: Run, corpus: Corpus, model: Transformer, optim: Optimizers, state: State, stop: StopFlag
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
    spent = seconds_since_torchrun()
    everything = state_tensors(model, optim)
    save_seconds = total_bytes(everything, column_sharded(model, everything)) / SLOW_DISK
    evaluation_steps = scored_tokens(config, corpus) / config.optim.batch_tokens
    clock = Clock(state.step, steps, config.max_minutes, spent, save_seconds, evaluation_steps)
    module, rows = distribute(model), dist.share(config.sequences)
    ahead = Prefetcher(lambda step: batches.slice(step - 1, *rows), device)
    work, peak = flops(config, corpus.vocab.size).training, peak_flops(device, precision)
    model.train()
    run.status("running", state.step)
    run.say(start_line(model, device, precision, state.step))
    if config.max_minutes and spent:
        run.say(f"{duration(spent)} since torchrun began, of max_minutes = {config.max_minutes:g}")
    if dist.world_size() > 1:
        warm_up_ddp(config, module, model, ahead.take(state.step + 1), precision)

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
            raise dist.raised_by_rank_0(
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
