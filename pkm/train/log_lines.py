"""What a run records and shows while it trains: one line with everything one looks for, and a bar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pkm.corpus.batches import windows
from pkm.corpus.store import Corpus
from pkm.corpus.unknown import percent, warning
from pkm.device import Compute
from pkm.distributed import dist
from pkm.evaluation.evaluate import Evaluation
from pkm.format import amount, duration, perplexity
from pkm.machine import peak_memory
from pkm.model.cost import flops
from pkm.model.transformer import Transformer, parameters
from pkm.run.run import Run
from pkm.train.clock import Clock
from pkm.train.optim import Optimizers
from pkm.train.state import State
from pkm.train.step import Step


def progress(run: Run, done: int, steps: int) -> Iterator[int]:
    """The numbers (from 1) of the steps to go; on a terminal a bar with the time left stands below the log lines."""
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
        task = bar.add_task("train", total=steps, completed=done)
        for step in range(done + 1, steps + 1):
            yield step
            bar.update(task, completed=step)


def log(
    run: Run,
    compute: Compute,
    corpus: Corpus,
    model: Transformer,
    optim: Optimizers,
    state: State,
    clock: Clock,
    taken: Step,
) -> None:
    """Show, and append to metrics.jsonl, what one looks for while a run goes."""
    assert corpus.train is not None
    record: dict[str, Any] = {
        "loss": taken.loss,
        "tokens": state.step * run.config.optim.batch_tokens,
        "epochs": state.step * run.config.sequences / windows(corpus.train, run.config.corpus.context),
        "lr": optim.learning_rates(state.step),
        "gradient_norm": taken.norms,
        "update_size": taken.update_sizes,
        "skipped": state.skipped,
        "memories": {},
        "experts": {},
        "tables": optim.neglect(state.step),
    }
    if taken.usage is not None:
        for layer, meter in taken.usage.memories.items():
            usage, share = meter.result(), model.memory(layer).output_share()
            record["memories"][str(layer)] = {"usage": usage.percent, "kl": usage.kl, "output_share": share}
            if usage.recall is not None:
                record["memories"][str(layer)]["recall"] = usage.recall
            if (of_keys := model.memory(layer).loss()) is not None:
                record["memories"][str(layer)]["cores_loss"] = of_keys.item()
        for layer, meter in taken.usage.experts.items():
            usage = meter.result()
            record["experts"][str(layer)] = {"usage": usage.percent, "kl": usage.kl}
    speed = {"tokens_per_second": clock.tokens_per_second(), "peak_memory_bytes": peak_memory(compute.device)}
    if peak := compute.peak_flops():
        work = flops(run.config, corpus.vocab.size).training
        speed["mfu"] = speed["tokens_per_second"] * work / (peak * dist.world_size())
    run.metrics.write(state.step, "train", **record, **speed)
    run.say(log_line(state.step, run.config.optim.steps, record, speed, clock.left()))


def start_line(model: Transformer, compute: Compute, corpus: Corpus, step: int) -> str:
    """What begins, or goes on: sizes, where it computes, who computes the memories, and what the vocabulary knows not.

    A second line warns of text that it does not know well enough.
    """
    device, precision = compute.device, compute.precision
    dense, values = parameters(model)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    ranks = f", {dist.world_size()} ranks" if dist.world_size() > 1 else ""
    memories = "".join(f" | memory at layer {layer}: {memory.backend}" for layer, memory in model.memories())
    unknown = f" | {percent(corpus.train.unknown_share)} of training tokens are <unk>" if corpus.train else ""
    told = f"\n{line}" if (line := warning(corpus)) else ""
    begins = f"going on after step {step}" if step else "beginning"
    return f"{begins} | {amount(dense)} dense parameters, {amount(values)} values | {device.type} ({card}{ranks}), {precision}{memories}{unknown}{told}"


def log_line(step: int, steps: int, record: dict[str, Any], speed: dict[str, float], seconds_left: float) -> str:
    """One line with all that one looks for while a run goes."""
    both = {key: " / ".join(f"{x:.2e}" for x in record[key].values()) for key in ("lr", "gradient_norm")}
    moved = " / ".join(f"{x:.1e}" for x in record["update_size"].values())
    memories = "".join(
        f" | layer {layer} usage {m['usage']:.1f} % KL {m['kl']:.2f} share {m['output_share']:.2f}"
        + (f" recall {m['recall']:.2f}" if "recall" in m else "")
        + (f" cores' loss {m['cores_loss']:.1e}" if "cores_loss" in m else "")
        for layer, m in record["memories"].items()
    ) + "".join(
        f" | experts {layer} usage {m['usage']:.0f} % KL {m['kl']:.2f}" for layer, m in record["experts"].items()
    )
    for key, what in (("dead", "% of rows never read"), ("stale", "steps since others were")):
        if numbers := [f"{table[key]:.1f}" for table in record.get("tables", {}).values() if key in table]:
            memories += f" | {' / '.join(numbers)} {what}"
    mfu = f" | MFU {100 * speed['mfu']:.1f} %" if "mfu" in speed else ""
    return (
        f"step {step:>{len(str(steps))}}/{steps} | loss {record['loss']:.4f} | lr {both['lr']} | norm {both['gradient_norm']} | moved {moved}{memories}"
        f" | {speed['tokens_per_second']:,.0f} tok/s{mfu} | {speed['peak_memory_bytes'] / 2**30:.2f} GiB | {duration(seconds_left)} left"
    )


def valid_record(
    measured: Evaluation, never_read: dict[int | str, float], sample: dict[str, str] | None
) -> dict[str, Any]:
    """What metrics.jsonl holds of an evaluation on the validation split; never_read: by layer, % of slots that training never read."""
    record = measured.record()
    for layer, share in never_read.items():
        record["memories"][str(layer)]["never_read"] = share
    return record | ({"sample": sample} if sample else {})


def valid_line(step: int, measured: Evaluation, improved: bool, never_read: dict[int | str, float]) -> str:
    """One line of an evaluation on the validation split."""
    memories = "".join(
        f" | layer {n} usage {u.percent:.1f} % KL {u.kl:.2f} never read {never_read[n]:.1f} %"
        for n, u in measured.memories.items()
    )
    best = " | best so far" if improved else ""
    return f"step {step} | valid loss {measured.loss:.4f} | perplexity {perplexity(measured.perplexity, measured.loss)}{memories}{best}"
