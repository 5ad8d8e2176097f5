"""PEER (He, 2024): slots that are experts of one hidden unit, each two rows."""

import pytest
import torch
import torch.nn.functional as F

from pkm.config.schema import MemoryConfig, QueryConfig, ValuesOptim
from pkm.memory.adam import ValuesAdam
from pkm.memory.kernels.backend import Backend
from pkm.memory.layer import MemoryLayer
from pkm.memory.values import Values
from pkm.model import cost
from pkm.model.transformer import build_model, parameters
from tests.support.tiny import VOCAB_SIZE, tiny_config
from tests.support.whole_runs import many_and_one, straight_as_resumed, trained, with_values

KERNELS = ["reference", "auto"]
PEER = {
    "layers": [2], "sub_keys": 8, "heads": 2, "knn": 3, "query": {"dim": 8}, "read": "experts", "keys_shared_by_heads": True,
}  # fmt: skip


def layer(kernels: str = "auto", keys: str = "product", read: str = "experts", **more) -> MemoryLayer:
    sizes = {"sub_keys": 5} if keys == "product" else {"slots": 9}
    settings = {"layers": (1,), "heads": 2, "knn": 4, "query": QueryConfig(dim=6, norm="none"), **sizes, **more}
    torch.manual_seed(0)
    config = MemoryConfig(keys=keys, kernels=kernels, read=read, keys_shared_by_heads=True, **settings)
    return MemoryLayer(config, 10).double()


def by_formula(memory: MemoryLayer, x: torch.Tensor, act) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """f(x) = sum over heads and experts g act(u . x) v over all experts, most of whose g are 0 -> f (N, d), g (N, E), u . x."""
    w = memory.state_dict()
    query = (x @ w["query.first.weight"].T + w["query.first.bias"]).unflatten(-1, (memory.heads, -1))
    keys = w["keys.weight"][0]
    if keys.ndim == 3:
        half = query.shape[-1] // 2
        scores = (query[..., :half] @ keys[0].T).unsqueeze(-1) + (query[..., half:] @ keys[1].T).unsqueeze(-2)
        scores = scores.flatten(-2)
    else:
        scores = query @ keys.T
    lowest = scores.topk(memory.knn).values[..., -1:]
    g = scores.masked_fill(scores < lowest, -torch.inf).softmax(-1).sum(1)
    hidden = x @ w["read.down.weight"].T
    return (g * act(hidden)) @ w["values.weight"], g, hidden


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "keys, knn", [("product", 4), ("flat", 4), ("flat", 9)], ids=["product", "flat", "all experts"]
)
@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_it_is_the_sum_over_all_experts_weighted_by_the_softmax_of_the_selected(
    kernels: str, keys: str, knn: int, activation: str
) -> None:
    memory, x = layer(kernels, keys, knn=knn, activation=activation), torch.randn(2, 5, 10, dtype=torch.float64)
    expected, _, _ = by_formula(memory, x.flatten(0, 1), getattr(F, activation))
    torch.testing.assert_close(memory(x).flatten(0, 1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernels", KERNELS)
def test_gradients_are_those_of_the_output(kernels: str) -> None:
    memory = layer(kernels)
    weights, x = list(memory.parameters()), torch.randn(1, 3, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: memory(x), (x, *weights), eps=1e-7, atol=1e-5)


def test_experts_that_all_say_c_are_c_times_a_memory_of_values() -> None:
    memory, plain = layer(), layer(read="rows")
    plain.load_state_dict(memory.state_dict(), strict=False)
    memory.read.activation = lambda hidden: torch.full_like(hidden, 2.5)
    x = torch.randn(2, 5, 10, dtype=torch.float64)
    torch.testing.assert_close(memory(x), 2.5 * plain(x))


def test_one_expert_a_head_is_a_network_whose_hidden_units_each_token_picks() -> None:
    memory, x = layer(knn=1), torch.randn(6, 10, dtype=torch.float64)
    memory.record = True
    out = memory(x)
    indices = memory.selection[0].squeeze(-1).long()  # (N, H): the units
    u, v = memory.read.down.weight[indices], memory.values.weight[indices]
    network = torch.einsum("nh,nhd->nd", F.gelu(torch.einsum("nd,nhd->nh", x, u)), v)
    torch.testing.assert_close(out, network)


@pytest.mark.parametrize("kernels", KERNELS)
def test_both_tables_have_gradients_on_the_same_rows_by_the_papers_formula(kernels: str) -> None:
    memory, x = layer(kernels), torch.randn(6, 10, dtype=torch.float64)
    for table in (memory.values, memory.read.down):
        table.collect_rows()
    memory.record = True
    dy = torch.randn(6, 10, dtype=torch.float64)
    memory(x, torch.tensor([True] * 5 + [False])).backward(dy)
    x, dy = x[:5], dy[:5]
    h = (x @ memory.read.down.weight.T).requires_grad_()
    _, g, _ = by_formula(memory, x, F.gelu)
    (slope,) = torch.autograd.grad(F.gelu(h).sum(), h)
    by_u = (g * slope * (dy @ memory.values.weight.T)).T @ x  # dL/du_i = sum of g act'(u . x) (v . dy) x
    by_v = (g * F.gelu(h)).T @ dy
    read = (g > 0).any(0).nonzero().squeeze(1)
    for table, expected in ((memory.read.down, by_u), (memory.values, by_v)):
        found = table.gradient()
        assert table.weight.grad is None and torch.equal(found.rows, read)
        torch.testing.assert_close(found.values, expected[read].to(found.values.dtype), rtol=1e-6, atol=1e-9)
    assert memory.selection[0][5].min() >= 0 and len(read) < memory.slots  # padding was given slots, and read none


@pytest.mark.parametrize("kernels", ["reference", "torch"])
def test_rows_that_move_inside_backward_are_multiplied_with_as_they_were(kernels: str) -> None:
    tables = [Values(12, 6), Values(12, 6)]
    tables[1].load_state_dict(tables[0].state_dict())
    x, indices = torch.randn(7, 6), torch.randint(-1, 12, (7, 5), dtype=torch.int32)
    by_x = []
    for table, update in zip(tables, ("sparse", "in_backward"), strict=True):
        table.backend = Backend(kernels)
        optimizer = ValuesAdam({"u": table}, ValuesOptim(update=update))
        optimizer.begin(1e-2, 1)
        given = x.clone().requires_grad_()
        table.dots(given, indices).square().sum().backward()
        optimizer.step(1e-2, 1)
        by_x.append(given.grad)
    torch.testing.assert_close(by_x[0], by_x[1])
    torch.testing.assert_close(tables[0].weight, tables[1].weight)


def test_parameters_and_work_are_counted() -> None:
    config = tiny_config(memory=PEER)
    found, model = cost.parameters(config, VOCAB_SIZE), build_model(config, VOCAB_SIZE)
    assert (found.dense, found.values) == parameters(model) and found.values == 2 * 64 * 16
    assert found.total == sum(p.numel() for p in model.parameters())
    assert cost.flops(config, VOCAB_SIZE).read == 4 * 2 * 3 * 16
    assert list(model.tables()) == ["blocks.1.memory.values", "blocks.1.memory.read.down"]
    both = build_model(tiny_config(memory={**PEER, "layers": [1, 2], "share_values": True}), VOCAB_SIZE)
    assert list(both.tables()) == ["blocks.0.memory.values", "blocks.0.memory.read.down"]
    assert both.memory(2).read.down is both.memory(1).read.down


def test_it_trains_and_a_resumed_run_is_the_same_to_the_last_bit(train) -> None:
    straight = straight_as_resumed(train, memory=PEER)
    assert "optim.values.blocks.1.memory.read.down.weight.mean" in straight.tensors


@pytest.mark.parametrize("values", ["replicated", "sharded"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_it_as_one_rank_does(tiny_corpus_path, tmp_path, values: str, ranks: int) -> None:
    make = with_values(values, tiny_corpus_path, tmp_path, memory=PEER)
    both = many_and_one(make, ranks, 6, lambda model: list(model.memory(2).read.down.weight.shape))
    assert both.found == [[64, 16 // ranks if values == "sharded" else 16]] * ranks
    for table in ("values", "read.down"):
        name = f"blocks.1.memory.{table}.weight"
        both.assert_close(f"model.{name}", f"optim.values.{name}.mean")
    trained(make("many", 9), reports=True)  # one rank goes on with what they have saved
