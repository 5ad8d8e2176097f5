"""A grid before it is run: its cells, their sizes, and about how long and how large each is."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from pkm.distributed.torchrun import ONE_NODE
from pkm.evaluation.recall import is_asked
from pkm.evaluation.speed import measured_here
from pkm.experiments.estimate import Estimate, Estimator, total
from pkm.experiments.jobs import SPEED, TRAIN, Job
from pkm.experiments.workers import Worker
from pkm.format import amount, roughly, size
from pkm.model.cost import parameters
from pkm.run.lock import lock_holder


def plan(jobs: Sequence[Job], estimator: Estimator, workers: Sequence[Worker]) -> Iterator[Table | str]:
    """A table of the runs, and lines that sum it up."""
    left = [_left(job, estimator) for job in jobs]
    yield _table(jobs, left, estimator)
    finished = sum(one is not None and not one.train and job.trained for job, one in zip(jobs, left, strict=True))
    trained = sum(job.trained for job in jobs)
    at_once = f"{len(workers)} at a time" + (f", {workers[0].ranks} GPUs each" if workers[0].ranks > 1 else "")
    untrained = f", {len(jobs) - trained} that are only timed" if trained < len(jobs) else ""
    yield f"{trained} runs to train{untrained}; {finished} finished; {at_once}"
    seconds = total(left, len(workers))
    bases = ", ".join(dict.fromkeys(one.basis for one in left if one.train))
    yield f"time left, about: {roughly(seconds)}" + (f" (from {bases})" if bases else "")
    for path in dict.fromkeys(job.config.corpus.path for job in jobs):
        if estimator.corpus(next(job.config for job in jobs if job.config.corpus.path == path)) is None:
            yield f"there is no prepared corpus at {path} yet: counted with the paper's vocabulary, without its evaluations"


def commands(jobs: Sequence[Job], ranks: int) -> Iterator[str]:
    """What runs each by hand, for a shell."""
    for job in jobs:
        start = ["python"] if ranks == 1 else ["torchrun", *ONE_NODE, f"--nproc-per-node={ranks}"]
        program = [*start, _shown(TRAIN)] if job.trained else ["python", _shown(SPEED)]
        yield f"# {', '.join(job.cells)}"
        yield shlex.join([*program, _shown(job.file), *job.arguments])


def _shown(path: Path) -> str:
    """As short as it can be from here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _left(job: Job, estimator: Estimator) -> Estimate:
    """What is still to be done for a job."""
    whole = estimator.of(job, job.saved_step())
    train = 0.0 if job.is_finished() else whole.train
    speed = 0.0 if job.timed and measured_here(job.config, job.trained) and not train else whole.speed
    return Estimate(train, speed, whole.memory, whole.basis)


def _table(jobs: Sequence[Job], left: Sequence[Estimate], estimator: Estimator) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("run", "left"), ("settings", "left"), ("dense", "right"), ("values", "right"),
                          ("memory", "right"), ("time", "right"), ("", "left")):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for job, estimate in zip(jobs, left, strict=True):
        count = parameters(job.config, estimator.vocabulary(job.config))
        table.add_row(
            job.title,
            " ".join(job.changed),
            amount(count.dense),
            amount(count.values) if count.values else "-",
            size(estimate.memory) if job.trained else "-",
            roughly(estimate.train + estimate.speed) if estimate.train + estimate.speed else "-",
            _remark(job, estimate),
        )
    return table


def _remark(job: Job, estimate: Estimate) -> str:
    also = f"also {', '.join(job.cells[1:])}" if len(job.cells) > 1 else ""
    if not job.trained:
        said = "timed only" if estimate.speed else "timed already"
    elif not estimate.train:
        said = "finished" + (", to be timed" if estimate.speed else "")
        said += ", to be asked for facts" if job.recall and not is_asked(job.directory) else ""
    elif holder := lock_holder(job.directory / "lock"):
        said = f"at work: {holder}"
    elif step := job.saved_step():
        said = f"goes on after step {step}"
    else:
        said = ""
    return "; ".join(part for part in (said, also) if part)
