"""Mixtures of experts against their definition, one token at a time; their loads, their grouped products, their training."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from pkm.model import experts as module
from pkm.model.experts import Experts, _products
from pkm.model.transformer import ACTIVATIONS, build_model
from pkm.run.metrics import read
from tests.support.tiny import VOCAB_SIZE, everything, tiny_config

EXPERTS = {"count": 5, "active": 2, "ffn": 24}


def mixture(activation="gelu", **settings) -> Experts:
    torch.manual_seed(3)
    config = tiny_config(model={"experts": EXPERTS | settings, "activation": activation})
    return Experts(config, ACTIVATIONS[activation])


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("active", [1, 2, 5])
def test_each_token_is_given_the_sum_of_its_experts_and_gradients_follow(activation, active):
    experts = mixture(activation, active=active).double()
    x = torch.randn(3, 7, 16, dtype=torch.float64, requires_grad=True)
    wanted = []
    for token in x.flatten(0, 1):
        p = (experts.router.weight @ token).softmax(0)
        best = p.argsort(descending=True)[:active].tolist()
        total = sum(p[i] for i in best) if active > 1 else 1
        y = 0
        for i in best:
            inner = experts.activation((experts.expand if activation == "gelu" else experts.gate)[i] @ token)
            inner = inner * (experts.expand[i] @ token) if activation == "swiglu" else inner
            y = y + p[i] / total * (experts.contract[i] @ inner)
        wanted.append(y)
    wanted = torch.stack(wanted).view(x.shape)
    found = experts(x)
    torch.testing.assert_close(found, wanted)
    given = [x, *experts.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), given), torch.autograd.grad(wanted.square().sum(), given)
    )


def test_an_expert_that_nobody_chooses_has_a_gradient_of_zero():
    experts = mixture()
    with torch.no_grad():
        experts.router.weight[2:] = -5.0
        experts.router.weight[:2] = 5.0
    experts(torch.rand(2, 4, 16)).sum().backward()
    assert (experts.expand.grad[2:] == 0).all() and (experts.expand.grad[:2] != 0).any()


def test_the_loss_that_evens_out_loads_is_one_a_token_for_an_even_load_and_more_for_any_other():
    experts = mixture(balance=1.0, count=4, active=2)
    x = torch.randn(1, 600, 16)
    with torch.no_grad():
        experts.router.weight.zero_()
    experts(x)
    assert experts.balance.item() == pytest.approx(600)  # P is even, so whatever f is
    with torch.no_grad():
        x[..., 0] = 1
        experts.router.weight[:, 0] = torch.tensor([9.0, 8.0, -9.0, -9.0])
    experts(x)
    assert experts.balance.item() == pytest.approx(
        1200, rel=0.01
    )  # f and P on half of the experts alone: twice as much
    experts.eval()(x)
    assert experts.balance is None


def test_it_is_in_the_gradient_and_not_in_the_loss_that_is_told():
    ids, found = torch.randint(14, VOCAB_SIZE, (4, 8), generator=torch.Generator().manual_seed(1)), []
    for balance in (0.0, 10.0):
        model = build_model(
            tiny_config(memory=None, model={"experts": EXPERTS | {"balance": balance}}), VOCAB_SIZE
        ).train()
        loss = model(ids, ids)
        loss.backward()
        found.append((loss.detach(), model.blocks[0].feed_forward.router.weight.grad))
    assert torch.equal(found[0][0], found[1][0]) and not torch.allclose(found[0][1], found[1][1])


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped product")
def test_a_grouped_product_is_a_product_for_each(monkeypatch):
    rows, weights = torch.randn(20, 16).bfloat16().requires_grad_(), torch.randn(4, 8, 16).bfloat16().requires_grad_()
    loads, found = torch.tensor([3, 0, 12, 5]), []
    for grouped in (True, False):
        monkeypatch.setattr(module, "grouped", lambda rows, weights, grouped=grouped: grouped)
        y = _products(rows, weights, loads)
        found.append((y, *torch.autograd.grad(y.float().square().sum(), [rows, weights])))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-1)


def test_whatever_the_loads_products_of_bf16_have_few_numbers_of_rows(monkeypatch):
    seen, linear, all_loads = set(), F.linear, set()
    monkeypatch.setattr(F, "linear", lambda rows, matrix: seen.add(len(rows)) or linear(rows, matrix))
    weights, rng = torch.ones(9, 1, 1).bfloat16(), torch.Generator().manual_seed(2)
    for _ in range(100):
        chosen = torch.multinomial(torch.rand(9, generator=rng).square(), 4096, replacement=True, generator=rng)
        loads = torch.bincount(chosen, minlength=9)
        _products(torch.ones(4096, 1).bfloat16(), weights, loads)
        all_loads |= {*loads.tolist()}
    assert len(all_loads) > 500 and len(seen) < 48
    assert all(0 <= module.one_of_few(n) - n < max(16, n / 8) for n in range(5000))


def test_rows_that_are_added_to_a_product_change_no_other_and_no_gradient():
    loads = torch.tensor([3, 0, 40, 1])
    rows, weights = torch.randn(44, 8).bfloat16(), torch.randn(4, 6, 8).bfloat16()
    rows[43], weights[3] = torch.inf, torch.nan  # stays with its expert
    rows.requires_grad_(), weights.requires_grad_()
    found = _products(rows, weights, loads)
    grad = torch.randn(44, 6)
    of_rows, of_weights = torch.autograd.grad(found, [rows, weights], grad.bfloat16())
    grad = grad.bfloat16().double()
    for expert, (start, stop) in enumerate([(0, 3), (3, 3), (3, 43)]):
        part, matrix = rows[start:stop].double(), weights[expert].double()
        by_rows, by_weights = grad[start:stop] @ matrix, grad[start:stop].T @ part
        torch.testing.assert_close(found[start:stop].double(), part @ matrix.T, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(of_rows[start:stop].double(), by_rows, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(of_weights[expert].double(), by_weights, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("place", ["replace", "beside", "after"])
def test_experts_stand_where_the_config_puts_them_and_no_later_token_is_seen(place):
    config = tiny_config(memory={"place": place}, model={"experts": EXPERTS, "activation": "swiglu"})
    model = build_model(config, VOCAB_SIZE).eval()
    assert [layer for layer, _ in model.experts()] == ([1] if place == "replace" else [1, 2])
    ids = torch.randint(14, VOCAB_SIZE, (3, 8), generator=torch.Generator().manual_seed(1))
    other = torch.cat([ids[:, :5], ids[:, 5:].flip(1)], 1)
    torch.testing.assert_close(model.hidden(ids)[:, :5], model.hidden(other)[:, :5], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("more", [{}, {"parallel": {"activation_checkpointing": True}}])
def test_they_train_resume_to_the_same_bits_and_say_how_they_are_used(train, more):
    settings = {"model": {"experts": EXPERTS}, "memory": {"place": "beside"}, **more}
    model, optim, _, directory = train(name="whole", **settings)
    with pytest.MonkeyPatch.context() as stopped:
        stopped.setattr("pkm.run.stop.StopFlag.requested", lambda self, directory: "test")
        train(name="parts", **settings)
    again, its_optim, state, _ = train(name="parts", **settings)
    assert state.step == 20
    ours, theirs = everything(model, optim), everything(again, its_optim)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    records = list(read(directory / "metrics.jsonl"))
    assert [r["loss"] for r in records if r["kind"] == "train"][-1] < 3.2
    for record in ([r for r in records if r["kind"] == kind][-1] for kind in ("train", "valid")):
        assert set(record["experts"]) == {"1", "2"}
        assert all(0 < json.loads(json.dumps(use))["kl"] < 1.7 for use in record["experts"].values())


def test_recomputed_activations_give_the_same_gradients():
    ids, found = torch.randint(14, VOCAB_SIZE, (4, 8), generator=torch.Generator().manual_seed(1)), []
    for again in (False, True):
        model = build_model(tiny_config(memory=None, model={"experts": EXPERTS | {"balance": 1.0}}), VOCAB_SIZE).train()
        model.activation_checkpointing = again
        model(ids, ids).backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_compiled_blocks_compute_the_same_and_are_compiled_once_whatever_the_loads():
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        model = build_model(tiny_config(memory=None, model={"experts": EXPERTS, "layers": 1}), VOCAB_SIZE).train()
        if compiled:
            model.blocks[0].compile(backend=counter)
        counts = []
        for step in range(4):
            ids = torch.randint(14, VOCAB_SIZE, (4, 8), generator=torch.Generator().manual_seed(step))
            loss = model(ids, ids)
            loss.backward()
            counts.append(counter.frame_count)
        found.append((loss.detach(), model.blocks[0].feed_forward.router.weight.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert 0 < counts[0] == counts[-1]
