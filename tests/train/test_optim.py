import math
import sys
import types
from itertools import pairwise

import pytest
import torch

from pkm.config.schema import DenseOptim
from pkm.errors import UserError
from pkm.model.transformer import build_model
from pkm.train.optim import LossScale, build_optimizers, learning_rate
from tests.support.tiny import VOCAB_SIZE, tiny_config


def rates(steps=100, **settings):
    optim = DenseOptim(lr=1.0, **settings)
    return [learning_rate(optim, step, steps) for step in range(1, steps + 1)]


def test_inverse_sqrt_warms_up_linearly_then_falls_with_the_root_of_the_step():
    lr = rates(schedule="inverse_sqrt", warmup_steps=10)
    assert lr[:10] == pytest.approx([s / 10 for s in range(1, 11)])
    assert lr[39] == pytest.approx(math.sqrt(10 / 40))


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_cosine_and_linear_fall_from_the_peak_to_zero_at_the_last_step(schedule):
    lr = rates(schedule=schedule, warmup_steps=20)
    assert lr[19] == pytest.approx(1.0)
    assert lr[59] == pytest.approx(0.5)
    assert lr[99] == pytest.approx(0.0, abs=1e-12)
    assert all(a >= b for a, b in pairwise(lr[19:]))


def test_constant_stays_at_the_peak():
    assert set(rates(schedule="constant", warmup_steps=0)) == {1.0}


SCHEDULES = ("inverse_sqrt", "cosine", "linear", "wsd", "constant")


def test_no_schedule_exceeds_its_peak_or_divides_by_zero_without_warm_up():
    for schedule in SCHEDULES:
        assert all(0 <= lr <= 1 for lr in rates(schedule=schedule, warmup_steps=0))
        assert all(0 <= lr <= 1 for lr in rates(schedule=schedule, warmup_steps=0, cooldown=0.0))


def test_wsd_stays_at_the_peak_until_its_cooldown_and_falls_linearly_in_it():
    lr = rates(schedule="wsd", warmup_steps=10, cooldown=0.2)
    assert lr[:10] == pytest.approx([s / 10 for s in range(1, 11)]) and set(lr[9:80]) == {1.0}
    assert lr[80:] == pytest.approx([1 - s / 20 for s in range(1, 21)])
    assert rates(schedule="wsd", warmup_steps=10, cooldown=0.2, floor=0.1)[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_after_the_warm_up_no_schedule_falls_below_its_floor(schedule):
    lr = rates(steps=1000, schedule=schedule, warmup_steps=5, floor=0.25)
    assert lr[0] == pytest.approx(0.2) and min(lr[4:]) == pytest.approx(1.0 if schedule == "constant" else 0.25)
    assert all(a >= b for a, b in pairwise(lr[4:]))


def a_step(config, seed=3, micro_batches=1):
    """Model and optimizers after backward over 8 windows."""
    model = build_model(config, VOCAB_SIZE).train()
    optim = build_optimizers(config.optim, model)
    ids = torch.randint(14, VOCAB_SIZE, (8, 8), generator=torch.Generator().manual_seed(seed))
    targets = ids.roll(-1, 1)
    for rows in torch.arange(8).chunk(micro_batches):
        (model(ids[rows], targets[rows]) / targets.numel()).backward()
    return model, optim


@pytest.mark.parametrize("update", ["dense", "sparse"])
def test_accumulated_micro_batches_update_as_one_big_batch(update):
    # LayerNorm on the query: BatchNorm's statistics are those of a micro-batch, as the README says.
    config = tiny_config(memory={"query": {"norm": "layer"}}, optim={"values": {"update": update}})
    weights = []
    for micro_batches in (1, 4):
        model, optim = a_step(config, micro_batches=micro_batches)
        optim.step(1, optim.gradient_norms())
        weights.append(model.state_dict())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)


def another_step(config, model, optim):
    """A second update, by optimizers built anew from what the first ones would have left in a checkpoint."""
    tensors = {name: t.clone() for name, t in optim.state_tensors().items()}
    optim = build_optimizers(config.optim, model)
    for name, tensor in optim.state_tensors().items():
        tensor.copy_(tensors[name])
    optim.sync_step_count()
    second_step(model, optim)
    return optim


def second_step(model, optim):
    optim.clear()
    ids = torch.randint(14, VOCAB_SIZE, (8, 8), generator=torch.Generator().manual_seed(9))
    (model(ids, ids.roll(-1, 1)) / 64).backward()
    optim.step(2, optim.gradient_norms())


def test_the_values_group_holds_the_values_and_nothing_else():
    config = tiny_config(optim={"values": {"update": "dense"}})
    model = build_model(config, VOCAB_SIZE)
    optim = build_optimizers(config.optim, model)
    assert list(optim.values.parameters) == ["blocks.1.memory.values.weight"]
    named = dict(model.named_parameters())
    assert set(optim.dense.parameters) == set(named) - {"blocks.1.memory.values.weight"}


def test_groups_follow_their_own_schedules():
    config = tiny_config(optim={"dense": {"lr": 1.0, "warmup_steps": 10}, "values": {"lr": 0.5}})
    optim = build_optimizers(config.optim, build_model(config, VOCAB_SIZE))
    assert optim.learning_rates(5) == {"dense": 0.5, "embeddings": 0.5, "addressing": 0.5, "values": 0.5}


def test_every_parameter_is_in_one_group_and_tables_are_not_in_dense():
    model = build_model(tiny_config(), VOCAB_SIZE)
    optim = build_optimizers(tiny_config().optim, model)
    named = {id(p): name for name, p in model.named_parameters()}
    groups = {group: sorted(named[id(p)] for p in ps) for group, ps in optim.dense.groups.items()}
    assert groups["embeddings"] == ["positions.weight", "tokens.weight"]
    assert groups["addressing"] and all(".memory.query." in n or ".memory.keys." in n for n in groups["addressing"])
    assert sum(map(len, groups.values())) == len(named) - 1  # the values


def test_a_ratio_is_of_the_dense_rate_and_what_is_not_given_is_as_in_dense():
    config = tiny_config(
        optim={
            "dense": {"lr": 0.02, "warmup_steps": 10, "schedule": "linear", "weight_decay": 0.1},
            "embeddings": {"lr": "10x", "warmup_steps": 0},
            "addressing": {"lr": "0.1x", "schedule": "constant"},
            "values": {"lr": "50x"},
        }
    ).optim
    assert config.group("embeddings").lr == pytest.approx(0.2)
    assert (config.group("embeddings").warmup_steps, config.group("embeddings").schedule) == (0, "linear")
    assert config.group("addressing").weight_decay == 0.1 and config.group("addressing").clip == 5.0
    optim = build_optimizers(config, build_model(tiny_config(), VOCAB_SIZE))
    rates = optim.learning_rates(20)  # the last step
    assert rates == pytest.approx({"dense": 0, "embeddings": 0, "addressing": 0.002, "values": 1.0}, abs=1e-12)


def test_groups_at_the_dense_rate_update_as_one_group_would_bit_for_bit():
    weights = []
    for groups in ({}, {name: {"clip": 1e-3, "lr": 1e-2} for name in ("embeddings", "addressing")}):
        model, optim = a_step(tiny_config(optim={"dense": {"clip": None}, **groups}))
        assert set(optim.gradient_norms()) == {"dense", "values", *groups}
        for name in groups:
            optim.settings[name] = optim.settings[name].model_copy(update={"clip": None})
        optim.step(5, optim.gradient_norms())
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_group_with_a_clip_of_its_own_does_not_count_in_the_dense_norm():
    config = tiny_config(optim={"dense": {"clip": 1e-3}, "embeddings": {"clip": 1e-4}})
    _, optim = a_step(config)
    optim.step(1, optim.gradient_norms())
    norms = optim.gradient_norms()
    assert float(norms["dense"]) == pytest.approx(1e-3, rel=1e-2)
    assert float(norms["embeddings"]) == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.parametrize("update", ["dense", "sparse", "in_backward"])
def test_update_sizes_are_rms_of_the_update_over_rms_of_the_weights(update):
    config = tiny_config(optim={"dense": {"clip": None}, "values": {"update": update}})
    model = build_model(config, VOCAB_SIZE).train()
    optim = build_optimizers(config.optim, model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    sizes = optim.update_sizes()
    optim.begin(5)
    ids = torch.randint(14, VOCAB_SIZE, (8, 8), generator=torch.Generator().manual_seed(3))
    (model(ids, ids.roll(-1, 1)) / ids.numel()).backward()
    optim.step(5, optim.gradient_norms())
    after = model.state_dict()

    def ratio(names):
        update = torch.cat([(after[n] - before[n]).flatten() for n in names])
        return float(update.norm() / torch.cat([before[n].flatten() for n in names]).norm())

    measured = sizes.result()
    assert measured["embeddings"] == pytest.approx(ratio(["tokens.weight", "positions.weight"]), rel=1e-5)
    table = "blocks.1.memory.values.weight"
    moved = (after[table] != before[table]).any(1)
    expected = (after[table] - before[table])[moved].norm() / before[table][moved].norm()
    assert measured["values"] == pytest.approx(float(expected), rel=1e-5)
    assert set(measured) == {"dense", "embeddings", "addressing", "values"}


@pytest.mark.parametrize("update", ["dense", "sparse"])
def test_each_group_is_clipped_to_its_own_norm(update):
    config = tiny_config(optim={"dense": {"clip": 1e-3}, "values": {"update": update, "clip": 1e-4}})
    _, optim = a_step(config)
    norms = optim.gradient_norms()
    assert norms["dense"] > 1e-3 and norms["values"] > 1e-4
    optim.step(1, norms)  # the clipped gradients are still there after the update
    norms = {name: float(norm) for name, norm in optim.gradient_norms().items()}
    assert norms == pytest.approx({"dense": 1e-3, "values": 1e-4}, rel=1e-2)


def test_state_tensors_bring_an_optimizer_back_bit_for_bit():
    config = tiny_config()
    ended = []
    for reload in (False, True):
        model, optim = a_step(config)
        optim.step(1, optim.gradient_norms())
        if reload:
            optim = another_step(config, model, optim)
        else:
            second_step(model, optim)
        ended.append({**model.state_dict(), **optim.state_tensors()})
    assert all(torch.equal(ended[0][name], ended[1][name]) for name in ended[0])


MUON = {"matrices": {"optimizer": "muon", "lr": 1e-2}}


def test_muon_moves_matrices_by_orthogonal_steps_of_the_size_of_adams_and_adam_the_rest():
    model, optim = a_step(tiny_config(optim=MUON))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optim.step(5, optim.gradient_norms())
    moved = set(optim.dense.groups["matrices"])
    assert len(moved) == 2 * 2 + 2  # attention's two of each block, and the one feed-forward network's
    for name, p in model.named_parameters():
        if p in moved:
            singular = torch.linalg.svdvals((p.detach() - before[name]).double()) / (
                1e-2 * 0.2 * math.sqrt(max(p.shape))
            )
            # Five iterations bring all but the smallest near 1 (Jordan et al., 2024: 0.7 to 1.2).
            assert singular.max() < 1.3 and singular.quantile(0.1) > 0.5, name
    adam_model, adam = a_step(tiny_config())
    adam.step(5, adam.gradient_norms())
    others = {name: p for name, p in adam_model.named_parameters() if dict(model.named_parameters())[name] not in moved}
    assert all(torch.equal(p, dict(model.named_parameters())[name]) for name, p in others.items())


def test_a_torch_without_muon_is_named(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UserError, match=f"torch {torch.__version__.replace('+', '.')} has no Muon") as refused:
        a_step(tiny_config(optim=MUON))
    assert refused.value.where == "optim.matrices.optimizer"


def test_matrices_apart_at_the_same_settings_update_as_with_dense_bit_for_bit():
    ended = []
    for matrices in (None, {"lr": "1x"}):
        model, optim = a_step(tiny_config(optim={"matrices": matrices}))
        optim.step(1, optim.gradient_norms())
        ended.append({**model.state_dict(), **optim.state_tensors()})
    assert ended[0].keys() == ended[1].keys() and all(torch.equal(ended[0][n], ended[1][n]) for n in ended[0])


def test_a_loss_scale_halves_on_overflow_and_grows_after_clean_steps():
    scale = LossScale(active=True)
    scale.update(overflowed=True)
    assert scale.value == LossScale.INITIAL / 2
    for _ in range(LossScale.GROWTH_STEPS):
        scale.update(overflowed=False)
    assert scale.value == LossScale.INITIAL
    other = LossScale(active=True, record=scale.record())
    assert other.record() == scale.record()


class PlainAdam(torch.optim.Optimizer):
    """Adam with apex's ways: moments by tensor, the number of updates in the group."""

    def __init__(self, groups, lr, betas, eps, adam_w_mode):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    def step(self):
        for group in self.param_groups:
            group["step"] += 1
            (b1, b2), t = group["betas"], group["step"]
            for p in group["params"]:
                state = self.state[p]
                state["exp_avg"].lerp_(p.grad, 1 - b1)
                state["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                denominator = (state["exp_avg_sq"] / (1 - b2**t)).sqrt() + group["eps"]
                p.data.sub_(group["lr"] * state["exp_avg"] / (1 - b1**t) / denominator)


def test_apex_is_used_when_asked_for_and_goes_on_from_torchs_state(monkeypatch):
    apex = types.ModuleType("apex.optimizers")
    apex.FusedAdam = PlainAdam
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", apex)
    ended = []
    for second in ("torch", "apex"):
        model, optim = a_step(tiny_config())
        optim.step(1, optim.gradient_norms())
        optim = another_step(tiny_config(optim={"dense": {"implementation": second}}), model, optim)
        assert isinstance(optim.dense.adam, PlainAdam) == (second == "apex")
        ended.append(model.state_dict())
    torch.testing.assert_close(ended[0], ended[1], rtol=1e-5, atol=1e-6)


def test_asking_for_apex_where_it_is_not_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))  # the web toolkit of that name
    config = tiny_config(optim={"dense": {"implementation": "apex"}})
    with pytest.raises(UserError, match=r"optim\.dense\.implementation.*apex"):
        build_optimizers(config.optim, build_model(config, VOCAB_SIZE))
