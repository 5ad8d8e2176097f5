"""What a run shows while it trains: one line with everything one looks for, and a bar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pkm.distributed import dist
from pkm.evaluation.evaluate import Evaluation
from pkm.format import amount, duration
from pkm.model.transformer import Transformer, parameters
from pkm.run.run import Run


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


def start_line(model: Transformer, device: torch.device, precision: str, step: int) -> str:
    """What begins, or goes on: sizes, where it computes, and who computes the memories."""
    dense, values = parameters(model)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    ranks = f", {dist.world_size()} ranks" if dist.world_size() > 1 else ""
    memories = "".join(f" | memory at layer {layer}: {memory.kernels}" for layer, memory in model.memories())
    begins = f"going on after step {step}" if step else "beginning"
    return f"{begins} | {amount(dense)} dense parameters, {amount(values)} values | {device.type} ({card}{ranks}), {precision}{memories}"


def log_line(step: int, steps: int, record: dict[str, Any], speed: dict[str, float], seconds_left: float) -> str:
    """One line with all that one looks for while a run goes."""
    both = {key: " / ".join(f"{x:.2e}" for x in record[key].values()) for key in ("lr", "gradient_norm")}
    moved = " / ".join(f"{x:.1e}" for x in record["update_size"].values())
    memories = "".join(
        f" | layer {layer} usage {m['usage']:.1f} % KL {m['kl']:.2f} share {m['output_share']:.2f}"
        for layer, m in record["memories"].items()
    )
    mfu = f" | MFU {100 * speed['mfu']:.1f} %" if "mfu" in speed else ""
    return (
        f"step {step:>{len(str(steps))}}/{steps} | loss {record['loss']:.4f} | lr {both['lr']} | norm {both['gradient_norm']} | moved {moved}{memories}"
        f" | {speed['tokens_per_second']:,.0f} tok/s{mfu} | {speed['peak_memory_bytes'] / 2**30:.2f} GiB | {duration(seconds_left)} left"
    )


def valid_line(step: int, measured: Evaluation, improved: bool) -> str:
    """One line of an evaluation on the validation split."""
    memories = "".join(f" | layer {n} usage {u.percent:.1f} % KL {u.kl:.2f}" for n, u in measured.memories.items())
    best = " | best so far" if improved else ""
    return f"step {step} | valid loss {measured.loss:.4f} | perplexity {measured.perplexity:.2f}{memories}{best}"
