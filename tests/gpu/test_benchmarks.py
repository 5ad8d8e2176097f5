"""The benchmarks of a GPU, small, on a CPU: that they run and add up, not how fast anything is."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks import memory_layer, model

CPU = torch.device("cpu")
SIZE = replace(model.SIZES["cpu"], tokens=64)


@pytest.mark.parametrize("sub_keys", [None, 32])
def test_the_parts_of_a_models_step_are_timed_with_their_floors(sub_keys: int | None) -> None:
    config = model.config_of(SIZE, 2, SIZE.tokens, "fp32", False, sub_keys)
    row = model.measure("tiny", config, SIZE, CPU, rate=1e12, copy=1e11, repeats=1)
    assert set(row.parts) == {*model.PARTS, "rest", "waiting"} - ({"memory"} if sub_keys is None else set())
    assert all(ms > 0 and least > 0 for part, (ms, least) in row.parts.items() if part in model.PARTS)
    assert row.parts["rest"][0] > 0 and row.training > 0 and row.inference > 0


def test_timing_the_parts_changes_no_gradient() -> None:
    config = model.config_of(SIZE, 2, SIZE.tokens, "fp32", False, 32)
    found = []
    for watched in (False, True):
        network = model.build_model(config, SIZE.vocabulary)
        parts = model.Parts(network, CPU) if watched else None
        torch.manual_seed(0)
        ids = torch.randint(14, SIZE.vocabulary, (2, 1 + SIZE.context))
        network(ids[:, :-1], ids[:, 1:]).backward()
        found.append([p.grad for p in network.parameters()])
        assert parts is None or set(parts.milliseconds()) == set(model.PARTS) - {"optimizer"}
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_layers_benchmark_times_the_kernels_and_the_configs_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(_: memory_layer.Clock, run: Callable[[], object]) -> float:
        run()
        return 1.0

    monkeypatch.setitem(memory_layer.SIZES, "cpu", [memory_layer.Size(32, 16, 2, 8, 4, 16)])
    monkeypatch.setattr(memory_layer, "ceilings", lambda clock, dtype: (1e11, 1e12))
    monkeypatch.setattr(memory_layer.Clock, "__call__", once)
    rows, _ = memory_layer.benchmark(CPU, torch.float32, 1, False, lambda rows, facts: None)
    assert [r.what for r in rows if "configs/paper" in r.what] and [r.what for r in rows if "stage" in r.what]
