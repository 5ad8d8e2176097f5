"""Column statistics and whole layers: the Triton kernels against `reference` and float64, on a GPU where there is one, else in Triton's interpreter.

Not collected by itself: tests/memory/test_triton.py runs it in a process of its own, since Triton decides when it is imported
whether it interprets. `scripts/gpu_check.sh` runs it on a GPU, where sizes are real ones besides.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pkm.config.schema import MemoryConfig, QueryConfig, ValuesOptim
from pkm.memory.adam import ValuesAdam
from pkm.memory.kernels import (
    statistics,
)
from pkm.memory.layer import MemoryLayer
from tests.support.on_device import DEVICE, GPU, assert_near, on_gpu


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(130, 70), (1, 3), *on_gpu((16384, 2048), (1000, 130))])
def test_column_statistics_and_their_gradient_equal_the_plain_ones(shape: tuple[int, int], masked: bool) -> None:
    x = (torch.randn(shape, device=DEVICE) * 3 + 100).requires_grad_()
    mask = torch.rand(shape[0], device=DEVICE) < 0.7 if masked else None
    g = torch.randn(2, shape[1], device=DEVICE)
    results = []
    for kernels, cast in (("triton", torch.float32), ("reference", torch.float64)):
        mean, var, count = statistics.column_statistics(x.to(cast), mask, kernels)
        (grad,) = torch.autograd.grad((mean, var), x, (g[0].to(cast), g[1].to(cast)))
        results.append((mean.double(), var.double(), count.double(), grad.double()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def layers(keys: str, norm: str, dim: int, **more: object) -> tuple[MemoryLayer, MemoryLayer]:
    sizes = {"sub_keys": 16} if keys == "product" else {"slots": 40}
    pair = []
    for kernels in ("triton", "reference"):
        config = MemoryConfig(
            layers=(1,),
            keys=keys,
            heads=2,
            knn=4,
            query=QueryConfig(dim=8, norm=norm),
            kernels=kernels,
            **{**sizes, **more},
        )
        torch.manual_seed(0)
        pair.append(MemoryLayer(config, dim).to(DEVICE))
    return pair[0], pair[1]


@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_a_layer_equals_the_reference_in_output_and_every_gradient(keys: str, norm: str) -> None:
    x = torch.randn(2, 3, 12, device=DEVICE)
    mask = torch.ones(2, 3, dtype=torch.bool, device=DEVICE)
    mask[1, 2] = False
    results = []
    for layer in layers(keys, norm, 12):
        optimizer = ValuesAdam({"values": layer.values}, ValuesOptim())
        inputs = x.clone().requires_grad_()
        out = layer(inputs, mask)
        out.square().sum().backward()
        gradient = layer.values.gradient()
        assert gradient is not None
        grads = {n: p.grad for n, p in layer.named_parameters() if n != "values.weight"}
        optimizer.step(1e-2, 1)
        results.append([out, inputs.grad, gradient.rows, gradient.values, layer.values.weight, *grads.values()])
        results[-1] += list(layer.buffers())
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_layer_of_experts_equals_the_reference_in_output_and_every_gradient_also_moved_inside_backward() -> None:
    x, results = torch.randn(1, 4, 12, device=DEVICE), []
    for kernels, update in (("reference", "sparse"), ("triton", "sparse"), ("triton", "in_backward")):
        config = MemoryConfig(
            layers=(1,), heads=2, sub_keys=8, knn=3, query=QueryConfig(dim=8), read="experts", kernels=kernels,
            keys_shared_by_heads=True,
        )  # fmt: skip
        torch.manual_seed(0)
        layer = MemoryLayer(config, 12).to(DEVICE)
        tables = {"values": layer.values, "down": layer.read.down}  # type: ignore[attr-defined]
        optimizer = ValuesAdam(tables, ValuesOptim(update=update))
        optimizer.begin(1e-2, 1)
        inputs = x.clone().requires_grad_()
        out = layer(inputs)
        out.square().sum().backward()
        optimizer.step(1e-2, 1)
        others = [p.grad for p in layer.parameters() if p.requires_grad]
        results.append([out, inputs.grad, *(table.weight for table in tables.values()), *others])
    for theirs, ours, inside in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(inside, theirs, rtol=1e-4, atol=1e-5)


def test_decay_and_the_step_that_read_a_row_last_are_those_of_the_plain_way() -> None:
    x, results = torch.randn(2, 5, 12, device=DEVICE), []
    for kernels in ("reference", "triton"):
        config = MemoryConfig(layers=(1,), heads=1, sub_keys=8, knn=2, query=QueryConfig(dim=8), kernels=kernels)
        torch.manual_seed(0)
        layer = MemoryLayer(config, 12).to(DEVICE)
        optimizer = ValuesAdam({"values": layer.values}, ValuesOptim(weight_decay=0.1, staleness=True))
        for step, factor in ((1, 1.0), (2, float("nan")), (3, 0.5)):
            optimizer.clear()
            layer(x[step % 2]).square().sum().backward()
            optimizer.step(1e-1, step, torch.tensor(factor, device=DEVICE))
        results.append([layer.values.weight, optimizer.last_read[0]])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not GPU, reason="compiles for a GPU")
@pytest.mark.parametrize("keys", ["product", "flat"])
def test_a_layer_compiles_whole_and_gives_the_same(keys: str) -> None:
    layer, _ = layers(keys, "batch", 64)
    ValuesAdam({"values": layer.values}, ValuesOptim())
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(2, 50, 64, device=DEVICE, requires_grad=True)
    outs = []
    for module in (layer, compiled):
        x.grad = None
        layer.values.clear_gradient()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = module(x)
        out.float().square().sum().backward()
        gradient = layer.values.gradient()
        assert gradient is not None
        outs.append((out, x.grad, gradient.rows, gradient.values))
    # The compiler may round a folded key to the other neighbour in bf16, and a near tie may then go the other way.
    (out, grad, rows, _), (compiled_out, compiled_grad, compiled_rows, _) = outs
    assert_near(compiled_out, out, 2e-2)
    assert_near(compiled_grad, grad, 5e-2)
    assert len(set(rows.tolist()) ^ set(compiled_rows.tolist())) <= 0.02 * len(rows)


@pytest.mark.skipif(not GPU, reason="trains at a size that an interpreter would take hours for")
def test_training_curves_with_triton_and_reference_agree() -> None:
    curves = []
    generator = torch.Generator().manual_seed(1)
    words, meanings = (torch.randn(300, 64, generator=generator).to(DEVICE) for _ in range(2))
    for layer in layers("product", "batch", 64, knn=8, sub_keys=32):
        values = ValuesAdam({"values": layer.values}, ValuesOptim())
        dense = torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=1e-3)
        generator = torch.Generator().manual_seed(2)
        losses = []
        for step in range(1, 151):
            ids = torch.randint(0, len(words), (4, 128), generator=generator).to(DEVICE)
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                loss = (layer(words[ids]).float() - meanings[ids]).square().mean()
            dense.zero_grad()
            values.clear()
            loss.backward()
            dense.step()
            values.step(3e-2, step)
            losses.append(loss.item())
        curves.append(np.array(losses))
    ours, theirs = curves
    assert ours[-10:].mean() < 0.5 * ours[:10].mean(), "nothing was learnt"
    np.testing.assert_allclose(ours[-20:].mean(), theirs[-20:].mean(), rtol=0.05)
    np.testing.assert_allclose(ours[:20].mean(), theirs[:20].mean(), rtol=0.02)
