import pytest
import torch

from pkm.memory.kernels import cpu, reference
from pkm.memory.kernels.backend import Backend
from pkm.memory.values import RowGradient, Values, add_rows

KERNELS = ["reference", "torch"]


def reads(tokens: int = 7, per_token: int = 5, slots: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, slots, (tokens, per_token)), torch.rand(tokens, per_token, dtype=torch.float64)


def pair(kernels: str = "reference", slots: int = 12, dim: int = 6) -> tuple[Values, Values]:
    """The same table, once dense and once with compact gradients."""
    dense, sparse = Values(slots, dim).double(), Values(slots, dim).double()
    dense.backend = sparse.backend = Backend(kernels)
    sparse.load_state_dict(dense.state_dict())
    sparse.collect_rows()
    return dense, sparse


def test_values_begin_normal_with_variance_one_over_width() -> None:
    weight = Values(500, 64).weight.detach()
    torch.testing.assert_close(weight.std(), torch.tensor(64**-0.5), rtol=0.02, atol=0)
    assert weight.mean().abs() < 0.002


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_read_is_the_weighted_sum_of_rows(kernels: str) -> None:
    values = pair(kernels)[0]
    indices, weights = reads()
    expected = (weights.unsqueeze(-1) * values.weight[indices]).sum(1)
    torch.testing.assert_close(values.read(indices, weights), expected)
    torch.testing.assert_close(values.read(indices.int(), weights), expected)


@pytest.mark.parametrize("kernels", KERNELS)
def test_gradients_of_a_read_are_those_of_finite_differences(kernels: str) -> None:
    values = Values(12, 3).double()
    indices, weights = reads(3, 4)

    def read(table: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.ops.pkm.read(table, indices, w, [], torch.float64, kernels)

    assert torch.autograd.gradcheck(read, (values.weight, weights.requires_grad_()))


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_compact_gradient_is_the_dense_one_on_the_rows_that_were_read(kernels: str) -> None:
    dense, sparse = pair(kernels)
    indices, weights = reads(3, 2)
    for table in (dense, sparse):
        table.read(indices, weights).square().sum().backward()
    gradient = sparse.gradient()
    assert gradient is not None and dense.weight.grad is not None and sparse.weight.grad is None
    assert torch.equal(gradient.rows, indices.unique())
    torch.testing.assert_close(gradient.values, dense.weight.grad[gradient.rows])
    assert dense.weight.grad.count_nonzero() == gradient.values.count_nonzero()


def test_backward_passes_add_up_until_the_gradient_is_cleared() -> None:
    dense, sparse = pair()
    for _ in range(3):
        indices, weights = reads()
        for table in (dense, sparse):
            table.read(indices, weights).square().sum().backward()
    gradient = sparse.gradient()
    assert gradient is not None and dense.weight.grad is not None
    torch.testing.assert_close(gradient.values, dense.weight.grad[gradient.rows])
    sparse.clear_gradient()
    assert sparse.gradient() is None


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_index_below_zero_reads_nothing_and_touches_no_row(kernels: str) -> None:
    _, sparse = pair(kernels)
    indices, weights = reads()
    indices[2:4] = -1
    weights.requires_grad_()
    out = sparse.read(indices, weights)
    assert (out[2:4] == 0).all()
    out.sum().backward()
    gradient = sparse.gradient()
    assert gradient is not None and weights.grad is not None
    assert torch.equal(gradient.rows, indices[indices >= 0].unique())
    assert (weights.grad[2:4] == 0).all()


def test_no_gradient_is_kept_without_a_backward_or_of_nothing() -> None:
    _, sparse = pair("torch")
    indices, weights = reads()
    with torch.no_grad():
        sparse.read(indices, weights)
    assert sparse.gradient() is None
    sparse.read(torch.full_like(indices, -1), weights).sum().backward()
    assert sparse.gradient() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_in_half_precision_are_summed_in_fp32(dtype: torch.dtype) -> None:
    table = torch.randn(12, 6).to(dtype)
    indices, weights = torch.randint(0, 12, (7, 5)), torch.rand(7, 5)
    expected = (weights.unsqueeze(-1) * table.float()[indices]).sum(1)
    for way in (cpu, reference):
        torch.testing.assert_close(way.read(table, indices, weights), expected)
        torch.testing.assert_close(
            way.weight_gradient(torch.ones(7, 6, dtype=dtype), table, indices), table.float()[indices].sum(-1)
        )


def test_the_fast_gradient_is_the_same_bits_on_every_run() -> None:
    indices, weights, grad = torch.randint(0, 50, (300, 16)), torch.rand(300, 16), torch.randn(300, 24)
    first = cpu.row_gradient(grad, indices, weights)
    for _ in range(3):
        again = cpu.row_gradient(grad, indices, weights)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_compact_gradients_add_row_by_row() -> None:
    a = RowGradient(torch.tensor([1, 4]), torch.tensor([[1.0], [2.0]]))
    b = RowGradient(torch.tensor([0, 4, 9]), torch.tensor([[5.0], [6.0], [7.0]]))
    total = add_rows(a, b)
    assert total.rows.tolist() == [0, 1, 4, 9] and total.values.flatten().tolist() == [5, 1, 8, 7]
