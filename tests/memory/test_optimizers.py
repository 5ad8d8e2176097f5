"""`pkm.optimizers` in a model that knows nothing of this package: as torch's optimizers, ranks and schedulers know it."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pkm
from pkm import ProductKeyMemory
from pkm.config.schema import ValuesOptim
from pkm.errors import UserError, UserErrors
from pkm.memory.adam import ValuesAdam
from tests.support.fork import on_ranks

WIDTH = 12


class Model(nn.Module):
    """Somebody's: a residual block with a memory."""

    def __init__(self, norm="batch"):
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.memory = ProductKeyMemory(dim=WIDTH, sub_keys=8, heads=2, knn=3, query={"dim": 8, "norm": norm})
        self.out = nn.Linear(WIDTH, 20)

    def forward(self, ids):
        x = self.embed(ids)
        return self.out(x + self.memory(self.norm(x)))


def built(norm="batch"):
    torch.manual_seed(3)
    return Model(norm)


def batch(step, rows=slice(None)):
    ids = torch.randint(0, 20, (8, 6), generator=torch.Generator().manual_seed(step))[rows]
    return ids, (3 * ids + 1) % 20


def loss_of(model, ids, targets):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def train(model, optimizer, steps, scheduler=None, first=1):
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, *batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses


def test_a_step_is_adamw_of_what_is_dense_and_lazy_adam_of_the_tables():
    ours, theirs = built("layer"), built("layer")
    optimizer = pkm.optimizers(ours, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1, values_lr=3e-2)
    values = ValuesAdam({"v": theirs.memory.values}, ValuesOptim())
    dense = [p for p in theirs.parameters() if p is not theirs.memory.values.weight]
    decayed, plain = ([p for p in dense if (p.dim() > 1) == matrices] for matrices in (True, False))
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-2, betas=(0.8, 0.9)
    )
    for step in (1, 2, 3):
        for model in (ours, theirs):
            loss_of(model, *batch(step)).backward()
        optimizer.step()
        adam.step()
        values.step(3e-2, step)
        optimizer.zero_grad()
        adam.zero_grad()
        values.clear()
        assert ours.memory.values.gradient() is None and ours.out.weight.grad is None
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    assert not torch.equal(ours.memory.values.weight, built("layer").memory.values.weight)


def test_it_learns_and_two_backwards_are_one_of_both():
    model = built()
    losses = train(model, pkm.optimizers(model, lr=1e-2, values_lr=1e-2), 60)
    assert losses[-1] < 0.3 * losses[0]
    ends = []
    for parts in ([slice(None)], [slice(0, 4), slice(4, 8)]):
        model = built("layer")
        optimizer = pkm.optimizers(model, lr=1e-2, values_lr=1e-2)
        for rows in parts:
            (loss_of(model, *batch(1, rows)) / len(parts)).backward()
        optimizer.step()
        ends.append(model.state_dict())
    torch.testing.assert_close(*ends)


def test_schedulers_set_every_groups_rate():
    model = built()
    optimizer = pkm.optimizers(model, lr=1e-2, values_lr=3e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step >= 2 else 1.0 / (step + 1))
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == {
        "matrices": 1e-2,
        "vectors": 1e-2,
        "values": 3e-2,
    }
    train(model, optimizer, 1, scheduler)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-3, 5e-3, 1.5e-2])
    before = copy.deepcopy(model.memory.values.weight)
    train(model, optimizer, 1, scheduler, first=2)
    assert not torch.equal(model.memory.values.weight, before)
    before = copy.deepcopy({name: p for name, p in model.named_parameters()})
    train(model, optimizer, 1, scheduler, first=3)  # with rates of 0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "bf16+master"])
def test_saved_and_loaded_it_goes_on_to_the_last_bit(dtype, tmp_path):
    settings = {"lr": 1e-2, "values_lr": 1e-2, "values_dtype": dtype, "values_state_dtype": "bf16"}
    model = built()
    optimizer = pkm.optimizers(model, **settings)
    train(model, optimizer, 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    resumed = Model()
    other = pkm.optimizers(resumed, **settings)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert train(model, optimizer, 3, first=4) == train(resumed, other, 3, first=4)
    assert all(
        torch.equal(p, q) for p, q in zip(model.state_dict().values(), resumed.state_dict().values(), strict=True)
    )


def test_the_state_of_another_model_is_refused_and_nothing_of_it_loaded():
    model, other = built(), nn.Sequential(built().memory)
    optimizer, another = pkm.optimizers(model), pkm.optimizers(other)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UserError, match=r"not of an optimizer of this model.*values\.mean"):
        optimizer.load_state_dict(another.state_dict())
    assert str(optimizer.state_dict()) == str(before)


def test_a_copied_model_trains_by_an_optimizer_of_its_own():
    model = built()
    optimizer = pkm.optimizers(model, lr=1e-2, values_lr=1e-2)
    train(model, optimizer, 2)
    other = copy.deepcopy(model)
    still = copy.deepcopy(model.state_dict())
    train(other, pkm.optimizers(other, lr=1e-2, values_lr=1e-2), 3)
    assert all(torch.equal(model.state_dict()[name], still[name]) for name in still)
    assert not torch.equal(other.memory.values.weight, model.memory.values.weight)


def test_a_compiled_model_trains_as_one_that_is_not():
    ends = []
    for compiled in (False, True):
        model = built()
        optimizer = pkm.optimizers(model, lr=1e-3, values_lr=1e-3)
        torch._dynamo.reset()
        # Inductor has no say in what is tested here, and a C++ compiler is not a given.
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        ends.append((train(run, optimizer, 3), model.state_dict()))
    torch.testing.assert_close(*ends)


def test_a_frozen_table_stays_as_it_is():
    model = built()
    model.memory.values.weight.requires_grad_(False)
    before = model.memory.values.weight.clone()
    optimizer = pkm.optimizers(model, lr=1e-2)
    train(model, optimizer, 2)
    assert torch.equal(model.memory.values.weight, before)
    assert [group["name"] for group in optimizer.param_groups] == ["matrices", "vectors"]


def by_module(memory, trains):
    memory.requires_grad_(trains)


def by_table(memory, trains):
    memory.values.weight.requires_grad_(trains)


def by_each_parameter(memory, trains):
    for parameter in memory.parameters():
        parameter.requires_grad = trains


@pytest.mark.parametrize("freeze", [by_module, by_table, by_each_parameter])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_table_frozen_after_the_optimizer_was_made_stays_as_it_is_until_it_is_unfrozen(freeze, compiled):
    model = built()
    optimizer = pkm.optimizers(model, lr=1e-2, values_lr=1e-2)
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    train(run, optimizer, 2)
    loss_of(run, *batch(3)).backward()  # whose gradient is there already
    for trains in (False, True):
        freeze(model.memory, trains)
        before, out = model.memory.values.weight.clone(), model.out.weight.clone()
        optimizer.step()
        train(run, optimizer, 2)
        assert torch.equal(model.memory.values.weight, before) != trains
        assert not torch.equal(model.out.weight, out)


def test_a_frozen_table_does_not_move_inside_backward_either():
    model = built()
    values = ValuesAdam({"v": model.memory.values}, ValuesOptim(update="in_backward"))
    by_module(model.memory, False)
    before = model.memory.values.weight.clone()
    values.begin(1e-2, 1)
    loss_of(model, *batch(1)).backward()
    values.step(1e-2, 1)
    assert torch.equal(model.memory.values.weight, before)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_table_is_frozen_if_the_table_is(duplicate):
    model = built()
    pkm.optimizers(model)
    assert not duplicate(model).memory.values.frozen
    by_module(model.memory, False)
    assert duplicate(model).memory.values.frozen
    assert "values" not in {group["name"] for group in pkm.optimizers(duplicate(model)).param_groups}


@pytest.mark.parametrize("overflows", [False, True])
def test_a_grad_scaler_scales_the_tables_gradients_back_and_skips_their_step_on_overflow(overflows):
    ours, theirs = built("layer"), built("layer")
    optimizer, plain = (pkm.optimizers(model, lr=1e-2, values_lr=1e-2) for model in (ours, theirs))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = loss_of(ours, *batch(1))
    scaler.scale(loss * float("inf") if overflows else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if not overflows:
        train(theirs, plain, 1)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-6)
    assert optimizer.updates == (0 if overflows else 1)


def on_a_rank(rank):
    """Three steps on a rank's half of the batch."""
    torch.manual_seed(100 + rank)
    model = Model("layer")  # DDP gives all the weights of rank 0
    if rank == 0:
        model.load_state_dict(built("layer").state_dict())
    refused = ""
    try:
        pkm.optimizers(DDP(copy.deepcopy(model)))
    except UserError as error:
        refused = str(error)
    optimizer = pkm.optimizers(model, lr=1e-2, values_lr=1e-2)
    wrapped = DDP(model)
    for step in (1, 2, 3):
        rows = slice(4 * rank, 4 * rank + 4)
        with wrapped.no_sync():
            (loss_of(wrapped, *batch(step, rows)) / 2).backward()
        (loss_of(wrapped, *batch(step, rows)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return refused, {name: t.numpy() for name, t in model.state_dict().items()}


def test_two_ranks_under_ddp_train_as_one_process_does():
    model = built("layer")
    train(model, pkm.optimizers(model, lr=1e-2, values_lr=1e-2), 3)
    for refused, state in on_ranks(2, on_a_rank):
        assert "make the optimizer first" in refused
        for name, expected in model.state_dict().items():
            torch.testing.assert_close(torch.from_numpy(state[name]), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": -1.0, "eps": 0.0}, r"- lr must be a number > 0; found -1.0\n- eps must be a number > 0; found 0.0"),
        ({"betas": (0.9, 1.0)}, r"- betas\[1\] must be a number >= 0 and < 1; found 1.0"),
        ({"weight_decay": float("nan")}, "- weight_decay must be a finite number >= 0; found nan"),
        ({"values_lr": "10x"}, "- values_lr must be a number > 0; found 10x"),
        ({"values_dtype": "fp16"}, r"- values_dtype must be one of: fp32, bf16, bf16\+master; found fp16"),
    ],
)
def test_every_setting_that_cannot_be_is_said_by_the_name_of_its_argument(settings, said):
    with pytest.raises(UserErrors, match=said):
        pkm.optimizers(built(), **settings)
