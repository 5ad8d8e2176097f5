"""What a run shows while it trains: one line with everything one looks for, a bar, and the time that is left."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pkm import dist
from pkm.count import amount
from pkm.evaluate import Evaluation
from pkm.model import Transformer
from pkm.parallel import parameters
from pkm.run import Run


class Clock:
    """Tokens per second since the last log line, and the time that is left; evaluations and saves are not counted as training.

    spent               seconds of `max_minutes` that are over already
    save_seconds        that the first save may take
    evaluation_steps    how long an evaluation may take, in steps, before there was one
    """

    def __init__(
        self,
        step: int,
        steps: int,
        max_minutes: float | None = None,
        spent: float = 0.0,
        save_seconds: float = 0.0,
        evaluation_steps: float = 0.0,
    ):
        self.steps, self.started_at, self.step = steps, step, step
        self.save_seconds, self.evaluation_steps, self.evaluation_seconds = save_seconds, evaluation_steps, 0.0
        self.deadline = time.perf_counter() + 60 * max_minutes - spent if max_minutes else None
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
        """What happened since the last tick was not training but an evaluation, or a save."""
        self.last = time.perf_counter()

    def evaluated(self) -> None:
        """What happened since the last tick was an evaluation."""
        self.evaluation_seconds = max(self.evaluation_seconds, time.perf_counter() - self.last)
        self.pause()

    def step_seconds(self) -> float:
        """Of a step, on average."""
        return self.seconds / max(self.step - self.started_at, 1)

    def must_stop(self, longest_save: float, saving: bool, evaluates: bool = False) -> bool:
        """Whether another step could leave too little of `max_minutes` to save in.

        longest_save    seconds that a save took so far; 0 before the first
        saving          one is going on, and the last one would have to wait for it
        evaluates       an evaluation comes with the next step
        """
        if self.deadline is None:
            return False
        save = (2.5 if saving else 1.5) * (longest_save or self.save_seconds)
        evaluation = 1.5 * (self.evaluation_seconds or self.evaluation_steps * self.step_seconds())
        return time.perf_counter() + 2 * self.step_seconds() + evaluation * evaluates + save > self.deadline

    def tokens_per_second(self) -> float:
        """Over the ticks since the last call."""
        speed = self.interval_tokens / max(self.interval_seconds, 1e-9)
        self.interval_tokens, self.interval_seconds = 0, 0.0
        return speed

    def left(self) -> float:
        """Seconds, at the pace so far."""
        return self.step_seconds() * (self.steps - self.step)


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


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on the GPU, or that the process held on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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


def duration(seconds: float) -> str:
    """3725.0 -> `1:02:05`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
