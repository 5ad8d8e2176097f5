import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pkm.config.schema import QueryConfig
from pkm.memory.query import BatchNorm, HeadsLinear, QueryNetwork


def trained_statistics(norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    return norm.running_mean.clone(), norm.running_var.clone()


def test_batch_norm_equals_torchs_in_output_gradient_and_running_statistics() -> None:
    ours, theirs = BatchNorm(6).double(), nn.BatchNorm1d(6).double()
    with torch.no_grad():
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            q.copy_(p.normal_())
    x = torch.randn(11, 6, dtype=torch.float64) * 3 + 1
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(3):
        ours(a).square().sum().backward()
        theirs(b).square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_padding_never_reaches_batch_norm() -> None:
    x = torch.randn(10, 4)
    mask = torch.arange(10) < 7
    alone, padded = BatchNorm(4), BatchNorm(4)
    expected = alone(x[:7])
    x[7:] = float("nan")
    torch.testing.assert_close(padded(x, mask)[:7], expected)
    torch.testing.assert_close(padded.running_mean, alone.running_mean)
    torch.testing.assert_close(padded.running_var, alone.running_var)


def test_a_batch_of_padding_alone_leaves_the_running_statistics_as_they_were() -> None:
    norm = BatchNorm(4)
    norm(torch.randn(9, 4))
    before = trained_statistics(norm)
    norm(torch.full((3, 4), float("nan")), torch.zeros(3, dtype=torch.bool))
    for old, new in zip(before, trained_statistics(norm), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_in_activation_checkpointing_does_not_update_statistics_twice(reentrant: bool) -> None:
    plain, recomputed = BatchNorm(4), BatchNorm(4)
    x = torch.randn(9, 4, requires_grad=True)
    plain(x).square().sum().backward()
    checkpoint(recomputed, x, use_reentrant=reentrant).square().sum().backward()
    for a, b in zip(trained_statistics(plain), trained_statistics(recomputed), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_statistics_of_parts_with_a_sum_over_ranks_equal_those_of_the_whole() -> None:
    x = torch.randn(12, 5, dtype=torch.float64)
    whole, part = BatchNorm(5).double(), BatchNorm(5).double()
    expected = whole(x)
    parts = {9: x[:9], 3: x[9:]}
    seen: list[torch.Tensor] = []
    # Two ranks in one process: the other's share of each sum, in the order in which BatchNorm asks for them.
    other = parts[3]
    mean = x.mean(0)
    shares = iter(
        [torch.tensor(3.0), 3 * other.mean(0), 3 * (other.var(0, correction=0) + (other.mean(0) - mean) ** 2)]
    )

    def add_other_rank(t: torch.Tensor) -> torch.Tensor:
        seen.append(t)
        return t + next(shares)

    part.sum_over_ranks = add_other_rank
    torch.testing.assert_close(part(parts[9]), expected[:9])
    torch.testing.assert_close(part.running_var, whole.running_var)
    assert len(seen) == 3


@pytest.mark.parametrize("norm", ["batch", "layer", "none"])
@pytest.mark.parametrize("hidden", [(), (7,), (7, 5)])
def test_each_head_has_a_query_network_of_its_own(norm: str, hidden: tuple[int, ...]) -> None:
    network = QueryNetwork(QueryConfig(dim=4, hidden=hidden, norm=norm), dim=6, heads=3)
    x = torch.randn(8, 6)
    before = network(x).whole()
    last = network.deeper[-1] if hidden else network.first
    with torch.no_grad():
        # Head 1's last layer alone.
        weight = last.weight[1] if isinstance(last, HeadsLinear) else last.weight[4:8]
        weight.normal_()
    after = network(x).whole()
    assert before.shape == (8, 3, 4)
    torch.testing.assert_close(after[:, [0, 2]], before[:, [0, 2]])
    assert not torch.allclose(after[:, 1], before[:, 1])


@pytest.mark.parametrize("hidden, expected", [((), 6 * 12 + 12), ((7,), 6 * 21 + 21 + 3 * (7 * 4 + 4))])
def test_parameters_of_the_query_network_are_as_documented(hidden: tuple[int, ...], expected: int) -> None:
    network = QueryNetwork(QueryConfig(dim=4, hidden=hidden, norm="none"), dim=6, heads=3)
    assert sum(p.numel() for p in network.parameters()) == expected


def test_layer_norm_is_over_each_heads_features() -> None:
    network = QueryNetwork(QueryConfig(dim=16, norm="layer"), dim=6, heads=2)
    query = network(torch.randn(5, 6) * 10).whole()
    torch.testing.assert_close(query.mean(-1), torch.zeros(5, 2), rtol=0, atol=1e-5)
    torch.testing.assert_close(query.var(-1, correction=0), torch.ones(5, 2), rtol=0, atol=1e-3)
