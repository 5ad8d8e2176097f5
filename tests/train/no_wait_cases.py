"""What a training step asks a GPU for, counted without one: Triton's kernels in its interpreter, every answer that would be waited for noted.

Not collected by itself: tests/train/test_no_wait.py runs it in a process of its own, since Triton decides when it is imported
whether it interprets. Numbers of a CPU are known without waiting; here the code is told that they are not.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

from pkm.device import Compute
from pkm.evaluation.evaluate import evaluate
from pkm.memory.kernels import cpu, triton_search
from pkm.train import loop, optim, step
from pkm.train.optim import LossScale, build_optimizers
from tests.support.tiny import everything, merged

TRITON = {"memory": {"kernels": "triton", "sub_keys": 8, "heads": 2, "knn": 3, "query": {"dim": 8}}}
QUIET: dict[str, Any] = {
    **TRITON,
    "log": {"every_steps": 100},
    "evaluate": {"every_steps": 100, "documents": 1},
    "checkpoint": {"every_steps": 100},
}
FEW = {"batch_tokens": 16}  # each read takes an interpreter milliseconds
ANSWERS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal"}


class Waits(TorchDispatchMode):
    """Where something was asked that only the device knows; a list of stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        picks = name == "index" and any(t is not None and t.dtype is torch.bool for t in args[1])
        if name in ANSWERS or picks:
            self.found.append(f"{name}:\n" + "".join(traceback.format_stack(limit=12)[:-1]))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (optim, step, loop):
        monkeypatch.setattr(module, "is_known", lambda number: isinstance(number, float))
    launch = interpreter.GridExecutor.__call__

    def unseen(self: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():  # what the interpreter reads is no business of the step
            launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", unseen)

    def search_into(scores: torch.Tensor, bias: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> None:
        """Interpreted, the search alone would take minutes; tests/memory/triton_search_cases.py is about it."""
        with _disable_current_modes():
            slots[:], weights[:] = cpu.search(scores, bias, slots.shape[-1])

    monkeypatch.setattr(triton_search, "search_into", search_into)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> Iterator[Waits]:
    """Waits of those steps, from their batch to the update."""
    waits, take = Waits(), loop.take_step

    def watched(*args: Any) -> Any:
        if args[7] not in steps:
            return take(*args)
        with waits:
            return take(*args)

    monkeypatch.setattr(loop, "take_step", watched)
    yield waits


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated and clipped": {"micro_batch": 1, "dense": {"clip": 1e-3}, "values": {"clip": 1e-3}},
    "bf16": {"values": {"dtype": "bf16+master", "state_dtype": "bf16"}},
    "in backward": {"values": {"update": "in_backward"}},
    "dense": {"values": {"update": "dense"}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_that_logs_nothing_waits_for_nothing(train: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with counted(monkeypatch, {2}) as waits:
        train(**QUIET, optim={"steps": 3, **FEW, **SETTINGS[name]})
    assert not waits.found, f"{len(waits.found)}\n" + waits.found[0]


def test_the_count_sees_a_wait(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = optim.Optimizers.gradient_norms
    monkeypatch.setattr(
        optim.Optimizers, "gradient_norms", lambda self: {n: x + 0 * float(x) for n, x in norms(self).items()}
    )
    with counted(monkeypatch, {2}) as waits:
        train(**QUIET, optim={"steps": 3, **FEW})
    assert len(waits.found) == 2


@pytest.mark.parametrize(
    "scaled, update, kernels", [(True, "sparse", "triton"), (False, "sparse", "auto"), (True, "dense", "auto")]
)
def test_what_is_read_a_step_later_changes_no_bit(
    train: Any, monkeypatch: pytest.MonkeyPatch, scaled: bool, update: str, kernels: str
) -> None:
    """Of runs that skip a step, clip and accumulate; with a loss scale and without."""
    if scaled:
        monkeypatch.setattr(loop, "LossScale", lambda active, *more: LossScale(True, *more))
    forward, ends = step.backward, []

    def poisoned(*args: Any, **more: Any) -> Any:
        loss, meters = forward(*args, **more)
        calls.append(1)
        return (loss * float("nan"), meters) if len(calls) == 3 else (loss, meters)

    monkeypatch.setattr(step, "backward", poisoned)
    for known in (True, False):
        calls: list[int] = []
        for module in (optim, step, loop):
            monkeypatch.setattr(module, "is_known", lambda number, known=known: known or isinstance(number, float))
        clips = {"dense": {"clip": 0.05}, "values": {"clip": 1e-3, "update": update}}
        model, optimizers, state, _ = train(
            name=f"{known}",
            **merged(QUIET, {"memory": {"kernels": kernels}}),
            optim={"steps": 5, "micro_batch": 1, **FEW, **clips},
        )
        ends.append((everything(model, optimizers), state.record()))
    (one, its_state), (other, others_state) = ends
    assert its_state["skipped"] == others_state["skipped"] == 1
    assert its_state["loss_scale"] == others_state["loss_scale"]
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_an_evaluation_waits_for_nothing_but_its_end(tiny_corpus_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pkm.corpus.store import open_corpus
    from pkm.model.transformer import build_model
    from tests.support.tiny import tiny_config

    counts = []
    for documents in (1, 4):
        config = tiny_config(**TRITON, corpus={"path": str(tiny_corpus_path)})
        corpus = open_corpus(config.corpus.path)
        assert corpus.valid is not None
        model = build_model(config, corpus.vocab.size)
        build_optimizers(config.optim, model)
        with Waits() as waits:
            evaluate(model, corpus, corpus.valid, config, Compute(torch.device("cpu"), "fp32"), documents)
        counts.append(len(waits.found))
    assert counts[0] == counts[1], waits.found[0]
