import copy

import pytest
import torch

from pkm.config.schema import ValuesOptim
from pkm.errors import UserError
from pkm.memory.adam import ValuesAdam
from pkm.memory.kernels import adam_step, cpu
from pkm.memory.kernels.backend import Backend
from pkm.memory.values import Values


def table(settings: ValuesOptim, slots: int = 10, dim: int = 4) -> tuple[Values, ValuesAdam]:
    torch.manual_seed(0)
    values = Values(slots, dim)
    values.backend = Backend("torch")
    return values, ValuesAdam({"t": values}, settings)


def read(values: Values, rows: list[int], scale: float = 1.0) -> torch.Tensor:
    """A loss that reads `rows`, one a token."""
    indices = torch.tensor(rows).unsqueeze(1)
    out = values.read(indices, torch.ones(len(rows), 1), torch.float32)
    return scale * (out * torch.arange(1.0, out.numel() + 1).view_as(out)).sum()


def test_sparse_adam_equals_dense_adam_where_every_row_is_read() -> None:
    values, adam = table(ValuesOptim(lr=1e-2, betas=(0.9, 0.99)))
    weight = torch.nn.Parameter(values.weight.detach().clone())
    dense = torch.optim.Adam([weight], lr=1e-2, betas=(0.9, 0.99), eps=1e-8)
    for step in range(1, 6):
        read(values, list(range(10)), step).backward()
        (step * (weight * torch.arange(1.0, 41).view(10, 4)).sum()).backward()
        adam.step(1e-2, step)
        adam.clear()
        dense.step()
        dense.zero_grad()
    torch.testing.assert_close(values.weight, weight)


def test_a_row_that_is_not_read_does_not_move_nor_do_its_moments() -> None:
    values, adam = table(ValuesOptim())
    read(values, [2, 5]).backward()
    adam.step(1e-3, 1)
    adam.clear()
    before = copy.deepcopy((values.weight.detach(), adam.state_tensors()))
    read(values, [5, 7]).backward()
    adam.step(1e-3, 2)
    still = [i for i in range(10) if i not in (5, 7)]
    assert torch.equal(values.weight[still], before[0][still])
    for name, tensor in adam.state_tensors().items():
        assert torch.equal(tensor[still], before[1][name][still])
        assert not torch.equal(tensor[[5, 7]], before[1][name][[5, 7]])


def test_bias_correction_counts_all_steps_not_those_that_read_a_row() -> None:
    values, adam = table(ValuesOptim(betas=(0.5, 0.75)))
    start = values.weight[3].detach().clone()
    read(values, [3]).backward()
    adam.step(1.0, 2)
    g = torch.arange(1.0, 5)
    mean, square = 0.5 * g / (1 - 0.5**2), 0.25 * g**2 / (1 - 0.75**2)
    torch.testing.assert_close(values.weight[3], start - mean / (square.sqrt() + 1e-8))


def test_the_norm_is_over_all_tables() -> None:
    a, b = Values(6, 3), Values(5, 2)
    adam = ValuesAdam({"a": a, "b": b}, ValuesOptim())
    assert adam.gradient_norm() == 0
    (read(a, [1, 1, 4]) + read(b, [0])).backward()
    whole = torch.cat([t.gradient().values.flatten() for t in (a, b)])  # type: ignore[union-attr]
    torch.testing.assert_close(adam.gradient_norm(), whole.norm())
    adam.clear()
    assert adam.gradient_norm() == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "bf16+master"])
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_fused_equals_sparse(dtype: str, state: str) -> None:
    ends = []
    for update in ("sparse", "in_backward"):
        values, adam = table(ValuesOptim(update=update, dtype=dtype, state_dtype=state))
        for step in range(1, 5):
            adam.begin(1e-2, step)
            read(values, [1, 3, 3, step]).backward()
            assert (values.gradient() is None) == (update == "in_backward")
            adam.step(1e-2, step)
            adam.clear()
        ends.append([values.weight.detach(), *adam.state_tensors().values()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_fused_refuses_a_second_backward_in_a_step() -> None:
    values, adam = table(ValuesOptim(update="in_backward"))
    adam.begin(1e-3, 1)
    read(values, [1]).backward()
    with pytest.raises(UserError, match="second backward"):
        read(values, [2]).backward()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e25], ids=["nan", "inf", "square beyond fp32"])
@pytest.mark.parametrize("kernels", ["torch", "reference"])
@pytest.mark.parametrize("update", ["sparse", "in_backward"])
@pytest.mark.parametrize("dtype, state", [("fp32", "fp32"), ("bf16", "bf16"), ("bf16+master", "bf16")])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_what_is_not_finite_moves_nothing(
    dtype: str, state: str, update: str, kernels: str, bad: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "COMPILED_FROM", 0 if compiled else 10**9)
    settings = ValuesOptim(update=update, dtype=dtype, state_dtype=state)
    (values, adam), (other, exact) = table(settings), table(settings)
    for step in (1, 2):
        for v, a, third in ((values, adam, bad if step == 2 else 1.0), (other, exact, 1.0)):
            a.begin(1e-2, step)
            v.backend = Backend(kernels)
            out = v.read(torch.tensor([[1], [4]]), torch.ones(2, 1), torch.float32)
            if step == 2:
                before = copy.deepcopy((v.weight.detach(), a.state_tensors()))
            out.backward(torch.tensor([[1.0, 2.0, third, 4.0], [5.0, 6.0, 7.0, 8.0]]))
            a.step(1e-2, step)
            a.clear()
    for ours, right, old in zip(
        (values.weight.detach(), *adam.state_tensors().values()),
        (other.weight.detach(), *exact.state_tensors().values()),
        (before[0], *before[1].values()),
        strict=True,
    ):
        right[1, 2] = old[1, 2]
        assert torch.equal(ours, right)


@pytest.mark.parametrize("update", ["sparse", "in_backward"])
def test_numbers_in_bf16_are_rounded_alike_however_many_ranks_share_the_columns(update: str) -> None:
    settings = ValuesOptim(update=update, dtype="bf16", state_dtype="bf16")
    whole, adam = table(settings, dim=12)
    start, grad = whole.weight.detach().clone(), torch.randn(3, 12)
    indices, weights = torch.tensor([[1], [4], [7]]), torch.ones(3, 1)
    ends = []
    for first, last in ((0, 12), (0, 4), (4, 8), (8, 12)):
        values, adam = table(settings, dim=last - first)
        values.weight.data, values.first_column = start[:, first:last].clone(), first
        adam.begin(1e-2, 1)
        values.read(indices, weights, torch.float32).backward(grad[:, first:last])
        adam.step(1e-2, 1)
        ends.append([values.weight.detach(), *adam.state_tensors().values()])
    for one, *parts in zip(*ends, strict=True):
        assert torch.equal(one, torch.cat(parts, 1))
        assert not torch.equal(parts[1][1] - parts[0][1], torch.zeros(4))


def test_noise_of_rounding_is_even_and_independent_of_place_step_and_use() -> None:
    rows, width = torch.arange(200), 64
    here, there, later = (
        adam_step._noise(rows + first, width, seed) for first, seed in ((0, 7), (200, 7), (0, 1_000_010))
    )
    uses = [
        here & 0xFFFF,
        (here >> 16) & 0xFFFF,
        adam_step._mixed(here.clone()) & 0xFFFF,
        there & 0xFFFF,
        later & 0xFFFF,
    ]
    numbers = torch.stack([use.double().flatten() for use in uses])
    assert ((numbers.mean(1) / 2**16 - 0.5).abs() < 0.01).all() and numbers.min() >= 0
    assert (numbers.corrcoef() - torch.eye(5)).abs().max() < 0.04
    across, down = uses[0].double(), uses[0].double().t()
    for neighbours in (across, down):
        pair = torch.stack([neighbours[:, 1:].flatten(), neighbours[:, :-1].flatten()])
        assert pair.corrcoef()[0, 1].abs() < 0.04


def test_bf16_values_move_by_updates_smaller_than_their_step() -> None:
    values, adam = table(ValuesOptim(dtype="bf16", betas=(0.0, 0.0)), slots=2, dim=512)
    values.weight.data.fill_(1.0)
    # Adam moves every number by lr: a tenth of a step of bf16 above 1/2; to the nearest, none would ever move.
    lr = 2.0**-8 / 10
    for step in range(1, 41):
        read(values, [0]).backward()
        adam.step(lr, step)
        adam.clear()
    assert values.weight.dtype is torch.bfloat16
    moved = 1 - values.weight[0].double().mean().item()
    assert moved == pytest.approx(40 * lr, rel=0.1)


def test_a_master_copy_is_updated_and_the_table_is_its_rounding() -> None:
    values, adam = table(ValuesOptim(dtype="bf16+master"))
    exact, other = table(ValuesOptim())
    for step in range(1, 4):
        for v, a in ((values, adam), (exact, other)):
            read(v, [1, 2]).backward()
            a.step(1e-3, step)
            a.clear()
    master = adam.state_tensors()["t.master"]
    torch.testing.assert_close(master, exact.weight.detach())
    assert torch.equal(values.weight, master.bfloat16())


def test_moments_are_kept_in_their_dtype() -> None:
    _, adam = table(ValuesOptim(state_dtype="bf16"))
    assert {t.dtype for t in adam.state_tensors().values()} == {torch.bfloat16}


def test_state_goes_through_a_checkpoint_and_training_goes_on_bit_by_bit() -> None:
    settings = ValuesOptim(dtype="bf16", state_dtype="bf16")
    values, adam = table(settings)
    for step in (1, 2):
        read(values, [step, 3]).backward()
        adam.step(1e-2, step)
        adam.clear()
    saved = {name: t.clone() for name, t in adam.state_tensors().items()}
    other, resumed = table(settings)
    other.load_state_dict(values.state_dict())
    for name, tensor in resumed.state_tensors().items():
        tensor.copy_(saved[name])
    for v, a in ((values, adam), (other, resumed)):
        read(v, [3, 4]).backward()
        a.step(1e-2, 3)
    assert torch.equal(values.weight, other.weight)
    for a_tensor, b_tensor in zip(adam.state_tensors().values(), resumed.state_tensors().values(), strict=True):
        assert torch.equal(a_tensor, b_tensor)


def test_a_gradient_that_is_scaled_and_unscaled_updates_as_if_it_never_was() -> None:
    plain, adam = table(ValuesOptim())
    scaled, other = table(ValuesOptim())
    read(plain, [1, 6]).backward()
    read(scaled, [1, 6], 1024.0).backward()
    adam.step(1e-3, 1)
    other.step(1e-3, 1, torch.tensor(1 / 1024))
    assert torch.equal(plain.weight, scaled.weight)


def test_a_factor_of_nan_moves_nothing() -> None:
    values, adam = table(ValuesOptim())
    before = values.weight.clone()
    read(values, [1, 6]).backward()
    adam.step(1e-3, 1, torch.tensor(float("nan")))
    assert torch.equal(values.weight, before) and not any(t.any() for t in adam.moments[0])


def test_accumulated_micro_batches_update_as_one_batch_does() -> None:
    parts, adam = table(ValuesOptim())
    whole, other = table(ValuesOptim())
    out = torch.tensor([[1], [2], [2], [7]])
    for rows in (out[:1], out[1:]):
        parts.read(rows, torch.ones(len(rows), 1)).sum().backward()
    whole.read(out, torch.ones(4, 1)).sum().backward()
    adam.step(1e-3, 1)
    other.step(1e-3, 1)
    torch.testing.assert_close(parts.weight, whole.weight)


@pytest.mark.parametrize("dtype", ["fp32", "bf16+master"])
def test_weight_decay_is_adamws_on_the_rows_that_are_read_and_leaves_the_others(dtype: str) -> None:
    settings = ValuesOptim(lr=1e-2, betas=(0.9, 0.99), weight_decay=0.3, dtype=dtype)
    values, adam = table(settings)
    start = adam.updated()[0].clone()
    rows = [1, 4, 7]
    weight = torch.nn.Parameter(start[rows].clone())
    dense = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.3)
    for step in range(1, 4):
        read(values, rows, step).backward()
        (step * (weight * torch.arange(1.0, 13).view(3, 4)).sum()).backward()
        adam.step(1e-2, step)
        adam.clear()
        dense.step()
        dense.zero_grad()
    torch.testing.assert_close(adam.updated()[0][rows], weight.detach())
    others = [i for i in range(10) if i not in rows]
    assert torch.equal(adam.updated()[0][others], start[others])


def test_rows_that_no_step_has_read_are_dead_and_the_others_grow_stale_until_they_are_read_again() -> None:
    values, adam = table(ValuesOptim(staleness=True))
    for step, rows in enumerate(([1, 4], [4, 7], []), start=1):
        if rows:
            read(values, rows).backward()
        adam.step(1e-3, step)
        adam.clear()
    # Row 1 was read at step 1, rows 4 and 7 at step 2: after step 3 that is 2, 1 and 1 steps ago; 7 of 10 rows never were.
    assert adam.neglect(3) == {"t": {"dead": pytest.approx(70), "stale": pytest.approx(4 / 3)}}
    assert adam.state_tensors()["t.last_read"].tolist() == [0, 1, 0, 0, 2, 0, 0, 2, 0, 0]
    plain, without = table(ValuesOptim())
    read(plain, [3]).backward()
    without.step(1e-3, 1)
    assert without.neglect(1) == {"t": {"dead": pytest.approx(90)}} and len(without.state_tensors()) == 2
