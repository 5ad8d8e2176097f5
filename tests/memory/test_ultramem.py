"""UltraMem (2024) and UltraMemV2 (2025): Tucker keys, several cores, virtual slots, linear experts."""

import math

import pytest
import torch

from pkm.config.schema import MemoryConfig, QueryConfig
from pkm.device import decide
from pkm.inference.generate import Reader
from pkm.memory.layer import MemoryLayer
from pkm.memory.query import Query
from pkm.memory.tucker import TuckerKeys, values_std
from pkm.memory.virtual import shuffled, shuffled_row
from pkm.model import cost
from pkm.model.attention import Places
from pkm.model.transformer import build_model, parameters
from pkm.train.step import backward
from tests.support.tiny import VOCAB_SIZE, tiny_config
from tests.support.whole_runs import many_and_one, straight_as_resumed, with_values

TUCKER = {
    "layers": [1, 2], "keys": "tucker", "sub_keys": 6, "rank": 2, "expansion": 4, "knn": 4, "keys_norm": "rms",
    "query": {"dim": 8, "norm": "rms"}, "place": "beside",
}  # fmt: skip
V1 = {**TUCKER, "heads": 2, "cores": 2, "cores_loss": 0.1, "values_dim": 8}
V2 = {**TUCKER, "heads": 1, "read": "experts-linear", "values_dim": 8, "input_dim": 4, "queries_by_rank": True}
BOTH = pytest.mark.parametrize("memory", [V1, V2], ids=["UltraMem", "UltraMemV2"])


def config(**more) -> MemoryConfig:
    settings = {"keys": "tucker", "heads": 2, "sub_keys": 6, "knn": 4, "query": QueryConfig(dim=8, norm="none")}
    return MemoryConfig(layers=(1,), **{**settings, **more})


def keys(**more) -> TuckerKeys:
    torch.manual_seed(0)
    return TuckerKeys(config(**more)).double()


def layer(dim: int = 12, **more) -> MemoryLayer:
    torch.manual_seed(0)
    return MemoryLayer(config(**more), dim).double()


def every_score(k: TuckerKeys, query: torch.Tensor) -> torch.Tensor:
    """All scores (N, H, C'^2) by the definition, a number at a time."""
    n, heads, q = query.shape
    out = torch.zeros(n, heads, k.side, k.side, dtype=torch.float64)
    weight, cores = k.weight.detach(), k.cores.detach().sum(1)
    for h in range(heads):
        for a in range(k.rank):
            for b in range(k.rank):
                row = query[:, h, : q // 2] @ weight[h, 0, a].T
                column = query[:, h, q // 2 :] @ weight[h, 1, b].T
                out[:, h] += cores[h, a, b] * row[:, :, None] * column[:, None, :]
    return out.flatten(-2)


def test_of_rank_one_and_one_core_the_score_is_the_product_of_both_sides() -> None:
    k = keys(rank=1, knn=3)
    with torch.no_grad():
        k.cores.fill_(1)
    query = torch.randn(5, 2, 8, dtype=torch.float64)
    slots, scores = k.search(query, 3)
    row = torch.einsum("nhq,hcq->nhc", query[..., :4], k.weight[:, 0, 0])
    column = torch.einsum("nhq,hcq->nhc", query[..., 4:], k.weight[:, 1, 0])
    torch.testing.assert_close(scores, row.gather(-1, slots // 6) * column.gather(-1, slots % 6))


@pytest.mark.parametrize("cores", [1, 3])
def test_scores_are_the_sum_over_cores_and_the_best_of_those_that_the_coarse_stage_leaves(cores: int) -> None:
    k, query = keys(rank=3, cores=cores).eval(), torch.randn(7, 2, 8, dtype=torch.float64)
    slots, parts = k.select(Query(query, None, None, torch.float64), 4)
    everything_ = every_score(k, query)
    total = parts if cores == 1 else parts.sum(-1)
    torch.testing.assert_close(total, everything_.gather(-1, slots))
    # The coarse stage by float64's own singular vectors, then the best of its 4 x 4 pairs.
    left, _, right = torch.linalg.svd(k.cores.detach().sum(1))
    for h in range(2):
        sign = -1.0 if left[h, :, 0].sum() < 0 else 1.0
        u, t = sign * left[h, :, 0], sign * right[h, 0]
        a = torch.einsum("nq,acq,a->nc", query[:, h, :4], k.weight[h, 0], u).topk(4).indices
        b = torch.einsum("nq,acq,a->nc", query[:, h, 4:], k.weight[h, 1], t).topk(4).indices
        pairs = (a[:, :, None] * 6 + b[:, None, :]).flatten(1)
        best = everything_[:, h].gather(-1, pairs).topk(4).values
        torch.testing.assert_close(total[:, h], best)


def test_with_one_direction_and_no_negative_score_it_finds_the_best_of_all_slots_and_otherwise_recall_says_how_many() -> (
    None
):
    k = keys(rank=2, knn=5, sub_keys=20).eval()
    query = torch.rand(9, 2, 8, dtype=torch.float64)
    with torch.no_grad():
        k.weight.abs_()
        k.cores.copy_(torch.einsum("a,b->ab", torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.5])))
    k.u, k.t = k.directions()
    slots, scores = k.search(query, 5)
    torch.testing.assert_close(scores, every_score(k, query).topk(5).values)
    asked = Query(query, None, None, torch.float64)
    assert k.recall(asked, slots) == 1
    other = keys(rank=2, knn=5, sub_keys=20).eval()  # keys and queries of both signs, a core of rank 2
    query = torch.randn(16, 2, 8, dtype=torch.float64)
    slots, _ = other.search(query, 5)
    best = every_score(other, query).topk(5).indices
    found = sum(
        len({*a} & {*b}) for a, b in zip(best.flatten(0, 1).tolist(), slots.flatten(0, 1).tolist(), strict=True)
    )
    recall = float(other.recall(Query(query, None, None, torch.float64), slots))
    assert recall == pytest.approx(found / (16 * 2 * 5)) and 0 < recall < 1


def test_directions_keep_their_sign_from_step_to_step() -> None:
    k = keys(rank=2)
    assert (k.u > 0).all() and (k.t > 0).all()  # of a positive matrix
    before = k.u.clone()
    with torch.no_grad():
        k.cores.add_(0.01 * torch.randn_like(k.cores))
    k.train().search(torch.randn(2, 2, 8, dtype=torch.float64), 2)
    assert ((k.u * before).sum(-1) > 0.99).all() and not torch.equal(k.u, before)
    kept = k.u.clone()
    with torch.no_grad():
        k.cores.mul_(2).add_(torch.rand_like(k.cores))
    k.eval().search(torch.randn(2, 2, 8, dtype=torch.float64), 2)
    assert torch.equal(k.u, kept)  # evaluation changes nothing


def test_the_loss_of_cores_is_of_all_singular_values_of_their_sum_but_the_first() -> None:
    k = keys(rank=3, cores=2, cores_loss=0.5)
    expected = 0.0
    for head in k.cores.detach().sum(1):
        _, *others = torch.linalg.eigvalsh(head.T @ head).sqrt().flip(0).tolist()
        expected += 0.5 / 2 * sum(max(0.0, value - 0.15) ** 2 for value in others)
    assert expected > 0.01 and k.loss().item() == pytest.approx(expected, rel=1e-9)
    assert torch.autograd.gradcheck(lambda _: k.loss(), (k.cores,))
    with torch.no_grad():
        k.cores.copy_(torch.ones_like(k.cores))
    assert k.loss() == 0 and keys(rank=3).loss() is None


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_step_learns_from_the_loss_of_cores_once_and_tells_the_text_s_alone(micro_batch: int | None) -> None:
    batch = tuple(torch.randint(14, VOCAB_SIZE, (8, 8)) for _ in range(2))
    found = []
    for alpha in (0.0, 0.1):
        c = tiny_config(memory={**V1, "cores_loss": alpha}, optim={"micro_batch": micro_batch})
        model = build_model(c, VOCAB_SIZE).train()
        loss, _ = backward(c, decide(c), model, model, batch, 1.0, measures=False)
        found.append((loss, model.memory(1).keys.cores))
    (plain, before), (told, cores) = found
    assert torch.equal(plain, told)
    (own,) = torch.autograd.grad(model.memory(1).loss(), cores)
    torch.testing.assert_close(cores.grad - before.grad, own)
    assert own.abs().max() > 1e-3


@pytest.mark.parametrize("rows, expansion", [(36, 4), (1, 1), (64, 9), (2500, 16)])
def test_the_shuffle_is_a_permutation_that_spreads_neighbours_over_the_blocks(rows: int, expansion: int) -> None:
    block, row = shuffled(torch.arange(rows * expansion), rows, expansion)
    assert sorted((block * rows + row).tolist()) == list(range(rows * expansion))
    assert torch.equal(shuffled_row(torch.arange(rows * expansion), rows, expansion), row)
    if rows > 1:
        in_order = block.view(-1, expansion)  # of so many neighbours
        assert (in_order.sort(-1).values.diff(dim=-1) > 0).float().mean() > 0.5


def test_virtual_slots_are_a_memory_over_the_table_of_all_rows_projected_in_shuffled_order() -> None:
    memory, x = layer(expansion=4, values_dim=6), torch.randn(5, 12, dtype=torch.float64)
    memory.record = True
    out = memory(x)
    slots, weights, _ = memory.selection
    projections = memory.output.project.weight.detach().view(12, 4, 6)  # (d, E, dv)
    table = torch.zeros(4 * 36, 12, dtype=torch.float64)
    for slot in range(4 * 36):
        block, row = (int(t) for t in shuffled(torch.tensor(slot), 36, 4))
        table[slot] = projections[:, block] @ memory.values.weight.detach()[row]
    torch.testing.assert_close(out, (weights.unsqueeze(-1) * table[slots]).sum((1, 2)))


def test_cores_weigh_columns_of_their_own_and_equal_ones_are_one_core_with_half_the_weight() -> None:
    two, one = layer(cores=2, values_dim=6), layer(cores=1, values_dim=6)
    x = torch.randn(5, 12, dtype=torch.float64)
    table = torch.randn(36, 6, dtype=torch.float64)
    for memory, sum_of_cores in ((two, 1.0), (one, 1.0)):
        state = {**memory.state_dict(), "values.weight": table.view_as(memory.values.weight)}
        for name in ("query.first.weight", "query.first.bias", "keys.weight", "output.project.weight"):
            state[name] = two.state_dict()[name]
        cores = torch.full_like(memory.keys.cores, sum_of_cores / memory.keys.cores.shape[1])
        cores[..., 0, 0] *= 3
        memory.load_state_dict({**state, "keys.cores": cores})
        memory.keys.u, memory.keys.t = memory.keys.directions()
    torch.testing.assert_close(two(x), 0.5 * one(x))
    with torch.no_grad():
        two.keys.cores[:, 1] = 0  # what this core weighs is the second half of every value
    torch.testing.assert_close(
        two.read(two.values, x, *_flat(two, x), torch.float64)[:, 3:], torch.zeros(5, 3).double()
    )


def _flat(memory: MemoryLayer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    indices, weights = memory.keys.select(memory.query(x), memory.knn)
    return indices.flatten(1), weights.flatten(1, 2)


def test_linear_experts_are_what_the_formula_says_and_with_constant_inputs_a_memory_of_rows() -> None:
    memory, x = layer(read="experts-linear", values_dim=6, input_dim=3, expansion=4), torch.randn(5, 12).double()
    memory.record = True
    out = memory(x)
    slots, weights, _ = memory.selection
    row = shuffled(slots, 36, 4)[1]
    p = x @ memory.read.project.weight.T
    inner = torch.einsum("nhkd,nd->nhk", memory.read.down.weight[row], p)
    expected = torch.einsum("nhk,nhkd->nd", weights * inner, memory.values.weight[row]) @ memory.output.project.weight.T
    torch.testing.assert_close(out, expected)
    with torch.no_grad():
        memory.read.down.weight.fill_(1 / 3)
        memory.read.project.weight.zero_()
        memory.read.project = torch.nn.Linear(12, 3).double()
        memory.read.project.weight.zero_()
        memory.read.project.bias.fill_(2.5)
    plain = 2.5 * torch.einsum("nhk,nhkd->nd", weights, memory.values.weight[row]) @ memory.output.project.weight.T
    torch.testing.assert_close(memory(x), plain)


def test_linear_experts_that_all_are_read_are_a_linear_network_of_two_layers_gated_by_scores() -> None:
    memory = layer(keys="flat", sub_keys=None, slots=9, knn=9, heads=1, read="experts-linear", values_dim=6)
    x = torch.randn(5, 12, dtype=torch.float64)
    query = x @ memory.query.first.weight.T + memory.query.first.bias
    gates = (query @ memory.keys.weight[0].T).softmax(-1)
    hidden = (x @ memory.read.project.weight.T) @ memory.read.down.weight.T
    torch.testing.assert_close(memory(x), (gates * hidden) @ memory.values.weight @ memory.output.project.weight.T)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(
    "more",
    [
        dict(cores=2, expansion=4, values_dim=6),
        dict(read="experts-linear", values_dim=4, input_dim=3, expansion=4, cores=2),
    ],
    ids=["rows", "experts"],
)
def test_gradients_are_those_of_the_output(kernels: str, more: dict) -> None:
    memory = layer(6, kernels=kernels, sub_keys=4, knn=3, keys_norm="rms", query=QueryConfig(dim=4, norm="rms"), **more)
    weights, x = list(memory.parameters()), torch.randn(1, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: memory(x), (x, *weights), eps=1e-7, atol=1e-5)


def test_a_rank_has_queries_of_its_own_where_it_is_asked_for() -> None:
    k, query = keys(queries_by_rank=True), torch.randn(3, 2, 8, dtype=torch.float64)
    rows, columns = k.scores(query)
    for side, scores in enumerate((rows, columns)):
        for a in range(2):
            part = query[..., 4 * side + 2 * a : 4 * side + 2 * a + 2]
            torch.testing.assert_close(scores[:, a], torch.einsum("nhq,hcq->hnc", part, k.weight[:, side, a]))


def test_chosen_scores_begin_with_mean_one_and_outputs_with_the_variance_of_a_feed_forward_network() -> None:
    dim, layers, inner = 64, 12, 4
    model = {"layers": layers, "dim": dim, "heads": 4, "ffn": inner * dim}
    common = {**TUCKER, "layers": [1, 6, 12], "sub_keys": 32, "knn": 16, "query": {"dim": 64, "norm": "rms"}}
    v1 = {**common, "heads": 2, "cores": 2, "values_dim": 32}
    v2 = {**common, "heads": 1, "read": "experts-linear", "values_dim": 32, "input_dim": 16}
    x = torch.randn(4096, dim)
    for memory, of in ((v1, "rows"), (v2, "experts")):
        built, found = build_model(tiny_config(model=model, memory=memory), VOCAB_SIZE), []
        for _, m in built.memories():
            found.append(float(m(x).detach().square().mean()))
            scores = m.keys.select(m.query(x), 16)[1].detach()  # of each core
            assert float(scores.mean()) == pytest.approx(1, rel=0.1)
        spread = float(scores.square().mean())
        # (1 + s^2) / 2L: sum over m H slots of w^2 N(0, E / (2 m H L)), then N(0, 1 / (E dv)). Of experts that of a gated network
        # of N(0, 2 / 5d) whose last map is N(0, 2 / 5d / 2L): 0.4^2 * k d * 0.4 / d / 2L.
        expected = {"rows": spread, "experts": 0.4**2 * inner * 0.4}[of] / (2 * layers)
        assert sum(found) / len(found) == pytest.approx(expected, rel=0.12)
        assert max(found) / min(found) < 1.3


def test_the_values_begin_as_the_papers_formula_has_it_at_its_227m_model() -> None:
    c = config(heads=1, knn=32, read="experts-linear", values_dim=192, input_dim=192)
    # "s_V about 0.065" at d 768, 20 layers, Dp = Dv = 192 and a feed-forward width of about 3.5 d.
    assert values_std(c, 768, 20, 2688, 0.4) == pytest.approx(0.065, rel=0.12)


@BOTH
def test_parameters_and_bytes_are_counted(memory: dict) -> None:
    for m in (memory, {**memory, "share_values": True}, {**memory, "keys_norm": "none", "keys_shared_by_heads": True}):
        c = tiny_config(memory=m)
        found, model = cost.parameters(c, VOCAB_SIZE), build_model(c, VOCAB_SIZE)
        assert (found.dense, found.values) == parameters(model)
        assert found.total == sum(p.numel() for p in model.parameters())


def test_tables_have_the_sizes_of_the_papers_models() -> None:
    # 227M active, 1.2B: 4 memories of 808^2 x 384 (UltraMem); 528^2 rows of 768 + 384 in each of 16 layers (UltraMemV2).
    def values(layers: int, **more) -> int:
        memory = {
            "keys": "tucker",
            "heads": 1,
            "knn": 32,
            "place": "beside",
            "layers": list(range(1, layers + 1)),
            **more,
        }
        return cost.parameters(tiny_config(model={"layers": 20, "dim": 768, "heads": 12}, memory=memory), 100).values

    assert values(4, sub_keys=808, values_dim=384, expansion=4, cores=2) == 808**2 * 4 * 384
    assert values(16, sub_keys=528, values_dim=384, input_dim=768, read="experts-linear") == 528**2 * 16 * (768 + 384)
    assert values(20, sub_keys=360, values_dim=192, input_dim=192, read="experts-linear") == 360**2 * 20 * (192 + 192)


@BOTH
def test_it_trains_and_a_resumed_run_is_the_same_to_the_last_bit(train, memory: dict) -> None:
    trained = straight_as_resumed(train, memory=memory).records
    assert all(0 < m["recall"] <= 1 and math.isfinite(m["kl"]) for m in trained[-1]["memories"].values())
    first, last = (record["memories"]["1"].get("cores_loss") for record in (trained[0], trained[-1]))
    assert (first, last) == (None, None) if memory is V2 else 0 <= last < first / 100


@BOTH
@pytest.mark.parametrize("values", ["replicated", "sharded"])
def test_two_ranks_train_it_as_one_does_and_the_report_says_how_many_of_the_best_slots_are_found(
    tiny_corpus_path, tmp_path, values: str, memory: dict
) -> None:
    both = many_and_one(with_values(values, tiny_corpus_path, tmp_path, memory=memory), ranks=2, steps=4)
    both.assert_close("model.blocks.0.memory.values.weight", "model.blocks.1.memory.keys.cores", rtol=1e-2, atol=1e-3)
    two, one = both.reports
    assert two["evaluation"]["loss"] == pytest.approx(one["evaluation"]["loss"], rel=1e-2)
    assert 0 < two["evaluation"]["memories"]["1"]["recall"] <= 1
    assert "best slots that the search finds, %" in (tmp_path / "many" / "report.md").read_text()


def skipping(**more):
    """Three blocks, of which the first has a memory whose output joins after the second."""
    memory = {**V1, "layers": [1], "skip": 1, **more.pop("memory", {})}
    return tiny_config(memory=memory, model={"layers": 3, **more.pop("model", {})}, **more)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_what_skips_blocks_is_read_where_the_memory_stands_and_joins_the_stream_after_the_later_block(
    norm: str,
) -> None:
    model = build_model(skipping(model={"norm": norm}), VOCAB_SIZE).double().eval()
    ids, places = torch.randint(14, VOCAB_SIZE, (2, 8)), Places()
    x = model.embedding_norm(model.tokens(ids) + model.positions(torch.arange(8)))
    first, second, third = model.blocks
    attention, norms = first.attention, first.norms
    if norm == "pre":
        x = x + attention(norms[0](x), places)
        h = norms[1](x)
        x = x + first.feed_forward(h)
    else:
        x = h = norms[0](x + attention(x, places))
        x = norms[1](x + first.feed_forward(x))
    x = third(second(x, None, places)[0] + first.memory(h), None, places)[0]
    torch.testing.assert_close(model.hidden(ids), model.final_norm(x))
    first.memory.record = True
    model.hidden(ids)
    assert first.memory.output_share() > 0


def test_over_blocks_that_add_nothing_a_memory_that_skips_them_is_one_beside_the_feed_forward_network() -> None:
    found, ids = [], torch.randint(14, VOCAB_SIZE, (2, 8))
    for skip in (0, 1):
        model = build_model(skipping(memory={"skip": skip}, model={"norm": "pre"}), VOCAB_SIZE).double().eval()
        model.memory(1).record = True
        with torch.no_grad():
            for last in (model.blocks[1].attention.out, model.blocks[1].feed_forward.contract):
                last.weight.zero_()
                last.bias.zero_()
            found.append((model.hidden(ids), model.memory(1).squares[0]))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("how", ["recomputed", "compiled"])
def test_recomputed_and_compiled_blocks_whose_memory_skips_others_give_the_same_gradients(how: str) -> None:
    found, ids = [], torch.randint(14, VOCAB_SIZE, (2, 8))
    for other in (False, True):
        model = build_model(skipping(model={"dropout": 0.0, "norm": "pre"}), VOCAB_SIZE).train()
        model.activation_checkpointing = other and how == "recomputed"
        for block in model.blocks if other and how == "compiled" else ():
            block.compile(fullgraph=True, backend="aot_eager")
        model(ids, ids).backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_a_text_that_is_read_token_by_token_has_what_skips_blocks_too() -> None:
    model, ids = build_model(skipping(), VOCAB_SIZE).eval(), torch.randint(14, VOCAB_SIZE, (3, 8))
    with torch.no_grad():
        reader = Reader(model, ids[:, :3])
        for length in range(3, 8):
            expected = model.logits(model.hidden(reader.ids)[:, -1])
            torch.testing.assert_close(reader.logits(), expected, rtol=1e-4, atol=1e-5)
            reader.append(ids[:, length : length + 1])


def test_a_model_whose_memory_skips_blocks_trains_resumes_to_the_same_bits_and_does_on_two_ranks_as_on_one(
    train, tiny_corpus_path, tmp_path
) -> None:
    model = {"layers": 3, "norm": "pre"}
    memory = {**V1, "layers": [1, 2], "skip": 1}
    records = straight_as_resumed(train, memory=memory, model=model).records
    assert all(m["output_share"] > 0 for m in records[-1]["memories"].values())
    make = with_values("sharded", tiny_corpus_path, tmp_path, memory=memory, model=model)
    many_and_one(make, ranks=2, steps=4).assert_close("model.blocks.0.memory.values.weight", rtol=1e-2, atol=1e-3)
