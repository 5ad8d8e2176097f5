"""Tokens per second, the time that is left, and when a run must stop to save in time."""

from __future__ import annotations

import time


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

    def must_stop(self, longest_save: float, saving: bool, evaluates: bool = False, steps: int = 2) -> bool:
        """Whether another step could leave too little of `max_minutes` to save in.

        longest_save    seconds that a save took so far; 0 before the first
        saving          one is going on, and the last one would have to wait for it
        evaluates       an evaluation comes with the next steps
        steps           that may pass before it does
        """
        if self.deadline is None:
            return False
        save = (2.5 if saving else 1.5) * (longest_save or self.save_seconds)
        evaluation = 1.5 * (self.evaluation_seconds or self.evaluation_steps * self.step_seconds())
        return time.perf_counter() + steps * self.step_seconds() + evaluation * evaluates + save > self.deadline

    def tokens_per_second(self) -> float:
        """Over the ticks since the last call."""
        speed = self.interval_tokens / max(self.interval_seconds, 1e-9)
        self.interval_tokens, self.interval_seconds = 0, 0.0
        return speed

    def left(self) -> float:
        """Seconds, at the pace so far."""
        return self.step_seconds() * (self.steps - self.step)
