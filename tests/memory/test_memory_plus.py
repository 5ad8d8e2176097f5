"""Memory+ (Memory Layers at Scale, 2024): one table for several layers, a gate, normalised queries and keys."""

import pytest
import torch
import torch.nn.functional as F

from pkm.config.schema import MemoryConfig, QueryConfig
from pkm.errors import UserErrors
from pkm.memory.layer import MemoryLayer
from pkm.model import cost
from pkm.model.transformer import build_model, parameters
from pkm.train.optim import build_optimizers
from tests.support.tiny import MINIMAL, VOCAB_SIZE, loaded, tiny_config
from tests.support.whole_runs import many_and_one, straight_as_resumed, trained, with_values

PLUS = {
    "layers": [1, 2], "sub_keys": 8, "heads": 2, "knn": 3, "query": {"dim": 8, "norm": "rms"}, "keys_norm": "rms",
    "share_values": True, "gate": "silu",
}  # fmt: skip


def layer(keys: str = "product", kernels: str = "auto", dim: int = 12, **more) -> MemoryLayer:
    sizes = {"sub_keys": 6} if keys == "product" else {"slots": 30}
    settings = {"layers": (1,), "heads": 3, "knn": 4, "query": QueryConfig(dim=8, norm="rms"), **sizes, **more}
    torch.manual_seed(0)
    return MemoryLayer(MemoryConfig(keys=keys, kernels=kernels, keys_norm="rms", **settings), dim)


def randomised(memory: MemoryLayer) -> MemoryLayer:
    """Gains and biases that begin as constants are none."""
    with torch.no_grad():
        for p in memory.parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn_like(p))
    return memory


def by_formula(memory: MemoryLayer, x: torch.Tensor) -> torch.Tensor:
    """The layer's output from its weights: every slot's score in float64, no two stages."""
    w = {name: p.double() for name, p in memory.state_dict().items()}
    heads, q = memory.heads, w["query.norm.weight"].numel() // memory.heads
    query = (x @ w["query.first.weight"].T + w["query.first.bias"]).unflatten(-1, (heads, q))
    query = query / (query.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w["query.norm.weight"].view(heads, q)
    keys = w["keys.weight"]
    keys = keys / (keys.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    sets = len(keys)
    if keys.ndim == 4:
        keys = keys * w["keys.gain"].view(sets, 2, 1, -1)
        first, second = (keys[:, side].expand(heads, -1, -1) for side in (0, 1))
        scores = torch.einsum("nhq,hcq->nhc", query[..., : q // 2], first).unsqueeze(-1)
        scores = (scores + torch.einsum("nhq,hcq->nhc", query[..., q // 2 :], second).unsqueeze(-2)).flatten(-2)
    else:
        scores = torch.einsum("nhq,hkq->nhk", query, (keys * w["keys.gain"].view(sets, 1, q)).expand(heads, -1, -1))
    best, slots = scores.topk(memory.knn)
    y = (best.softmax(-1).unsqueeze(-1) * w["values.weight"][slots]).sum((1, 2))
    if "output.gate.weight" not in w:
        return y
    gate = F.silu(x @ w["output.gate.weight"].T + w["output.gate.bias"])
    return (y * gate) @ w["output.project.weight"].T + w["output.project.bias"]


@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize("shared", [False, True], ids=["keys of each head", "keys shared by heads"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_it_is_what_the_formulas_say(keys: str, shared: bool, kernels: str) -> None:
    memory = randomised(layer(keys, kernels, gate="silu", keys_shared_by_heads=shared)).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(memory(x).flatten(0, 1), by_formula(memory, x.flatten(0, 1)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_gradients_are_those_of_the_output(keys: str, kernels: str) -> None:
    memory = randomised(layer(keys, kernels, gate="silu", keys_shared_by_heads=True)).double()
    weights, x = list(memory.parameters()), torch.randn(1, 4, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: memory(x), (x, *weights), eps=1e-7, atol=1e-5)


def test_a_gate_that_is_open_everywhere_leaves_the_read_as_it_is() -> None:
    plain, gated = (layer(gate=gate) for gate in ("none", "silu"))
    gated.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        gated.output.gate.weight.zero_()
        gated.output.gate.bias.fill_(1.278464542761074)  # silu of it is 1
        gated.output.project.weight.copy_(torch.eye(12))
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(gated(x), plain(x))


def test_padding_gets_nothing_not_even_the_gates_bias() -> None:
    memory = randomised(layer(gate="silu"))
    mask = torch.tensor([[True, True, False], [True, False, False]])
    out = memory(torch.randn(2, 3, 12), mask)
    assert (out[~mask] == 0).all() and (out[mask] != 0).all()


def test_all_layers_read_one_table_that_is_one_parameter() -> None:
    model = build_model(tiny_config(memory=PLUS), VOCAB_SIZE)
    first, second = model.memory(1), model.memory(2)
    assert first.values is second.values and first.query is not second.query
    assert list(model.tables()) == ["blocks.0.memory.values"]
    assert [name for name in model.state_dict() if "values" in name] == ["blocks.0.memory.values.weight"]
    moved = model.double()
    assert moved.memory(2).values.weight.dtype is torch.float64
    plain = build_model(tiny_config(memory={**PLUS, "share_values": False}), VOCAB_SIZE)
    assert sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in model.parameters()) == 64 * 16


@pytest.mark.parametrize("sparse", [False, True])
def test_the_tables_gradient_is_the_sum_of_those_of_copies_and_one_step_moves_the_rows_of_both(sparse: bool) -> None:
    config = tiny_config(memory=PLUS, optim={"values": {"update": "sparse" if sparse else "dense"}})
    apart = tiny_config(memory={**PLUS, "share_values": False}, optim={"values": {"update": "dense"}})
    shared, copies = build_model(config, VOCAB_SIZE), build_model(apart, VOCAB_SIZE)
    state = shared.state_dict()
    copies.load_state_dict({**state, "blocks.1.memory.values.weight": state["blocks.0.memory.values.weight"]})
    optim, table = build_optimizers(config.optim, shared), shared.memory(1).values
    before = table.weight.detach().clone()
    ids = torch.randint(14, VOCAB_SIZE, (2, 9))
    for model in (shared, copies):
        model(ids[:, :-1], ids[:, 1:]).backward()
    by_layer = [memory.values.weight.grad for _, memory in copies.memories()]
    expected = by_layer[0] + by_layer[1]
    touched = expected.abs().sum(1) > 0
    if sparse:
        gradient = table.gradient()
        assert touched.nonzero().squeeze(1).tolist() == gradient.rows.tolist()
        torch.testing.assert_close(gradient.values, expected[touched], rtol=1e-4, atol=1e-6)
    else:
        torch.testing.assert_close(table.weight.grad, expected, rtol=1e-4, atol=1e-6)
    optim.step(1, optim.gradient_norms())
    # Adam's first step of a number is lr * sign(gradient), once, however many layers read the row.
    moved = (table.weight.detach() - before)[touched]
    torch.testing.assert_close(moved, -1e-2 * expected[touched].sign(), rtol=1e-2, atol=2e-4)
    assert not sparse or torch.equal(table.weight.detach()[~touched], before[~touched])


def test_parameters_are_those_of_the_model_and_a_shared_table_counts_once() -> None:
    for memory in (PLUS, {**PLUS, "share_values": False}, {**PLUS, "keys_shared_by_heads": True},
                   {**PLUS, "keys": "flat", "sub_keys": None, "slots": 40, "keys_shared_by_heads": True}):  # fmt: skip
        config = tiny_config(memory=memory)
        found, model = cost.parameters(config, VOCAB_SIZE), build_model(config, VOCAB_SIZE)
        assert (found.dense, found.values) == parameters(model)
        assert found.total == sum(p.numel() for p in model.parameters())


def test_the_papers_table_of_a_million_slots_has_2_1_billion_numbers_at_any_number_of_layers() -> None:
    wide = {"layers": 24, "dim": 2048, "heads": 16}
    memory = {
        **PLUS,
        "layers": [5, 13, 21],
        "sub_keys": 1024,
        "heads": 4,
        "knn": 32,
        "query": {"dim": 1024, "norm": "rms"},
    }
    config = tiny_config(model=wide, memory=memory)
    assert cost.parameters(config, 32_000).values == 2_147_483_648
    # 3 tables of it where they are not shared.
    assert (
        cost.parameters(tiny_config(model=wide, memory={**memory, "share_values": False}), 32_000).values == 3 * 2**31
    )


def test_its_work_is_queries_scores_reads_and_the_gates_two_maps() -> None:
    d, heads, q, side, k = 16, 2, 8, 8, 3
    found = cost.flops(tiny_config(memory=PLUS), VOCAB_SIZE)
    of_a_layer = 2 * (d * heads * q + heads * 2 * side * q // 2) + 2 * heads * k * d + 4 * d * d
    assert found.query + found.search + found.read == 2 * of_a_layer
    ranks = [cost.traffic(tiny_config(memory=m), VOCAB_SIZE, 2).values for m in (PLUS, {**PLUS, "share_values": False})]
    assert ranks[0] < ranks[1]  # one table's rows are summed, not two tables'


def test_it_trains_and_a_resumed_run_is_the_same_to_the_last_bit(train) -> None:
    assert list(straight_as_resumed(train, memory=PLUS).records[-1]["memories"]) == ["1", "2"]


@pytest.mark.parametrize("values", ["replicated", "sharded"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_one_table_as_one_rank_does(tiny_corpus_path, tmp_path, values: str, ranks: int) -> None:
    make = with_values(values, tiny_corpus_path, tmp_path, memory=PLUS)
    both = many_and_one(make, ranks, 6, lambda model: list(model.memory(2).values.weight.shape))
    assert both.found == [[64, 16 // ranks if values == "sharded" else 16]] * ranks
    table = "blocks.0.memory.values.weight"
    of_values = {f"model.{table}", f"optim.values.{table}.mean", f"optim.values.{table}.square"}
    assert {name for name in both.many if "values" in name} == of_values
    both.assert_close(*of_values)
    many, one = both.reports
    assert many["parameters"] == one["parameters"] and list(many["evaluation"]["memories"]) == ["1", "2"]
    trained(make("many", 9), reports=True)  # one rank goes on with what they have saved


def test_a_table_that_several_layers_read_cannot_be_updated_inside_backward(tmp_path) -> None:
    text = MINIMAL + "memory: {layers: [3, 5], sub_keys: 64, share_values: true}\n"
    with pytest.raises(UserErrors, match=r"share_values: update: in_backward moves rows while other layers"):
        loaded(tmp_path, text, "optim.values.update=in_backward")
    assert loaded(tmp_path, text).memory.share_values
    assert loaded(tmp_path, text, "memory.layers=[3]", "optim.values.update=in_backward").memory.share_values
