import importlib.util

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pkm.config.schema import MemoryConfig, QueryConfig, ValuesOptim
from pkm.errors import UserError
from pkm.memory.adam import ValuesAdam
from pkm.memory.kernels import cpu, reference, search_op
from pkm.memory.layer import MemoryLayer
from pkm.memory.query import Query

KINDS = [("product", "batch"), ("product", "layer"), ("product", "none"), ("flat", "batch"), ("flat", "none")]


def build(
    keys: str = "product", norm: str = "batch", kernels: str = "auto", dim: int = 10, **more: object
) -> MemoryLayer:
    sizes: dict[str, object] = {"sub_keys": 8} if keys == "product" else {"slots": 30}
    settings = {"layers": (1,), "heads": 2, "knn": 3, "query": QueryConfig(dim=8, norm=norm), **sizes, **more}
    config = MemoryConfig(keys=keys, kernels=kernels, **settings)
    torch.manual_seed(0)
    return MemoryLayer(config, dim)


def results(layer: MemoryLayer, x: torch.Tensor, mask: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Output, and gradients of everything that is learnt."""
    x = x.clone().requires_grad_()
    out = layer(x, mask)
    out.square().sum().backward()
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    return [out.detach(), x.grad, *gradients, *layer.buffers()]  # type: ignore[list-item]


@pytest.mark.parametrize("keys, norm", KINDS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_the_fast_way_on_a_cpu_equals_the_reference(
    keys: str, norm: str, masked: bool, dtype: torch.dtype, tolerance: float
) -> None:
    x = torch.randn(2, 6, 10, dtype=dtype)
    mask = torch.rand(2, 6) < 0.7 if masked else None
    ours, theirs = (results(build(keys, norm, kernels).to(dtype), x, mask) for kernels in ("auto", "reference"))
    assert len(ours) == len(theirs) > 4
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "sizes, tokens",
    [({"sub_keys": 48, "knn": 12, "dim": 100}, 9), ({"knn": 8}, 9), ({"heads": 1, "norm": "none"}, 1)],
    ids=["no powers of two", "k = C", "one head, one token"],
)
def test_the_fast_way_equals_the_reference_at_any_size(sizes: dict[str, object], tokens: int) -> None:
    x = torch.randn(1, tokens, sizes.get("dim", 10))  # type: ignore[arg-type]
    ours, theirs = (results(build(kernels=kernels, **sizes), x) for kernels in ("auto", "reference"))  # type: ignore[arg-type]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "sizes",
    [
        {"sub_keys": 1, "knn": 1},
        {"sub_keys": 3},
        {"keys": "flat", "slots": 6},
        {"keys": "flat", "slots": 64, "knn": 32},
    ],
    ids=["one slot", "9 slots", "6 slots", "64 slots"],
)
def test_more_reads_of_a_token_than_there_are_slots_equal_the_reference(sizes: dict[str, object]) -> None:
    x = torch.randn(2, 5, 10)
    ours, theirs = (results(build(kernels=kernels, **{"heads": 4, **sizes}), x) for kernels in ("auto", "reference"))  # type: ignore[arg-type]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [{"sub_keys": 4}, {"keys": "flat", "slots": 7}])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_more_slots_a_head_than_there_are_to_choose_from_are_refused_alike(
    kernels: str, sizes: dict[str, object]
) -> None:
    there = r"4 sub-keys of a side" if "sub_keys" in sizes else r"7 slots"
    with pytest.raises(UserError, match=rf"memory.knn: k = 8 is more than the {there}"):
        build(kernels=kernels, knn=8, **sizes)  # type: ignore[arg-type]
    keys, query = build(kernels=kernels, knn=2, **sizes).keys, torch.randn(5, 2, 8)  # type: ignore[arg-type]
    whole = Query(query, None, None, query.dtype)
    for search in (lambda: keys.search(query, 8), lambda: keys.select(whole, 8)):
        with pytest.raises(UserError, match=there):
            search()


def test_two_runs_on_two_threads_give_the_same_bits_also_with_a_slot_that_everyone_reads() -> None:
    indices = torch.randint(0, 50, (400, 8), dtype=torch.int32)
    indices[:, 0] = 7
    weights, grad, table = torch.rand(400, 8), torch.randn(400, 64), torch.randn(50, 64)
    scores, bias = torch.randn(2, 2, 400, 40), torch.randn(2, 2, 40)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, second = (
            [
                *cpu.search(scores, bias, 6),
                cpu.read(table, indices, weights),
                cpu.weight_gradient(grad, table, indices),
                *cpu.row_gradient(grad, indices, weights),
            ]
            for _ in range(2)
        )
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    _, expected = reference.row_gradient(grad, indices, weights)
    torch.testing.assert_close(first[-1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keys, norm", KINDS)
def test_gradients_are_those_of_finite_differences(keys: str, norm: str) -> None:
    layer = build(keys, norm).double()
    x = torch.randn(1, 4, 10, dtype=torch.float64, requires_grad=True)
    names = [n for n, _ in layer.named_parameters()]

    def run(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    # Small steps: the selection must not change within one.
    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), eps=1e-7, atol=1e-5, nondet_tol=1e-12)


@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "nan", "infinite", "huge", "close"])
@pytest.mark.parametrize(
    "shape", [(3, 2, 16, 4), (1, 1, 12, 12), (5, 1, 1, 1), (4, 3, 48, 12), (5, 1, 300, 9), (0, 2, 8, 3)]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_fast_search_on_a_cpu_selects_what_the_reference_selects(
    shape: tuple[int, ...], kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, heads, sub_keys, k = shape
    scores = torch.randn(heads, 2, tokens, sub_keys)
    if kind == "ties":
        scores = torch.randint(-2, 3, scores.shape).float()
    elif kind == "zeros":
        scores = torch.where(scores > 0, 0.0, -0.0)
    elif kind == "nan":
        scores[:, :, ::2, sub_keys // 2] = float("nan")
    elif kind == "infinite":
        scores[:, 0, :, 0], scores[:, 1, :, sub_keys // 2] = float("inf"), float("-inf")
    elif kind == "huge":
        scores *= 2.0**127
    elif kind == "close":
        # Neighbours in fp32 around a large number: sums that rounding makes equal.
        scores = 1000 + torch.randint(0, 40, scores.shape) * 2.0**-13
    monkeypatch.setattr(cpu, "SORTED_AT_ONCE", 2 * sub_keys)  # several parts, the last one shorter
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    bias = torch.randn(heads, 2, sub_keys) if kind == "random" else torch.zeros(heads, 2, sub_keys)
    slots, weights = cpu.search(scores, bias, k)
    expected, best = reference.select_product((scores + bias.unsqueeze(2)).permute(2, 0, 1, 3).contiguous(), k)
    assert torch.equal(slots.long(), expected)
    torch.testing.assert_close(weights, best.softmax(-1), equal_nan=True)


def test_score_gradients_made_in_parts_equal_those_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(10, 2, 8, requires_grad=True)
    keys, bias = torch.randn(2, 2, 6, 4, requires_grad=True), torch.randn(2, 2, 6, requires_grad=True)
    grad = torch.randn(10, 2, 3)
    results = []
    for size in (1 << 26, 3 * 2 * 2 * 6 * 4):
        monkeypatch.setattr(search_op, "GRADIENT_BYTES", size)
        monkeypatch.setattr(search_op, "SCORE_BYTES", size)
        _, weights = search_op.search(query, keys, bias, 3, "torch")
        results.append(torch.autograd.grad(weights, (query, keys, bias), grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_padding_reads_nothing_and_touches_no_row() -> None:
    layer = build()
    ValuesAdam({"values": layer.values}, ValuesOptim())
    x, mask = torch.randn(2, 5, 10), torch.ones(2, 5, dtype=torch.bool)
    mask[1, 2:] = False
    layer.record = True
    out = layer(x, mask)
    assert (out[1, 2:] == 0).all() and (out[1, :2] != 0).any()
    out.sum().backward()
    indices, weights, real = layer.selection
    gradient = layer.values.gradient()
    assert gradient is not None and real is not None
    assert torch.equal(real, mask.flatten()) and torch.equal(gradient.rows, indices[real].long().unique())
    torch.testing.assert_close(weights[real].sum(-1), torch.ones(7, 2))


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_padding_that_is_not_finite_still_reads_nothing(kernels: str) -> None:
    layer = build(kernels=kernels)
    layer.eval()
    x, mask = torch.randn(1, 4, 10), torch.tensor([[True, True, False, False]])
    x[0, 2], x[0, 3] = torch.nan, torch.inf
    out = layer(x, mask)
    assert (out[0, 2:] == 0).all()
    torch.testing.assert_close(out[0, :2], layer(x[:, :2])[0])


def test_in_evaluation_a_token_sees_no_other() -> None:
    layer = build()
    for _ in range(3):
        layer(torch.randn(2, 50, 10))
    layer.eval()
    x = torch.randn(1, 6, 10)
    before = layer(x)
    x[0, 4] += 1
    after = layer(x)
    others = [0, 1, 2, 3, 5]
    torch.testing.assert_close(after[0, others], before[0, others], rtol=0, atol=1e-7)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_neither_gradients_nor_statistics(reentrant: bool) -> None:
    x = torch.randn(2, 6, 10)
    plain, recomputed = build(), build()
    expected = results(plain, x)
    y = x.clone().requires_grad_()
    out = checkpoint(recomputed, y, use_reentrant=reentrant)
    out.square().sum().backward()
    found = [
        out.detach(),
        y.grad,
        *(p.grad for p in recomputed.parameters() if p.grad is not None),
        *recomputed.buffers(),
    ]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("keys", ["product", "flat"])
def test_a_layer_compiles_whole_and_gives_the_same(keys: str, kernels: str) -> None:
    layer = build(keys, kernels=kernels)
    ValuesAdam({"values": layer.values}, ValuesOptim())
    # Inductor has no say in what is tested here, and a C++ compiler is not a given.
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, found = torch.randn(2, 6, 10), []
    for module in (layer, compiled):
        layer.zero_grad()
        layer.values.clear_gradient()
        layer.query.norm.running_mean.zero_()  # type: ignore[union-attr]
        layer.query.norm.running_var.fill_(1.0)  # type: ignore[union-attr]
        found.append([*results(module, x), *layer.values.gradient()])  # type: ignore[misc]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_under_autocast_scores_and_softmax_stay_in_fp32() -> None:
    layer, exact = build(dim=64, heads=4), build(dim=64, heads=4)
    x = torch.randn(2, 20, 64)
    layer.record = exact.record = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    expected = exact(x)
    indices, weights, _ = layer.selection
    assert out.dtype is torch.bfloat16 and weights.dtype is torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(40, 4))
    common = (indices.unsqueeze(-1) == exact.selection[0].unsqueeze(-2)).float().sum((-1, -2)) / 3
    assert common.mean() > 0.9
    assert (out.float() - expected).norm() < 0.3 * expected.norm()  # near ties went the other way
    assert layer.query.norm.running_mean.dtype is torch.float32  # type: ignore[union-attr]


def test_heads_have_keys_and_queries_of_their_own_and_share_the_values() -> None:
    layer = build(heads=3)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {
        "query.first.weight": (24, 10), "query.first.bias": (24,), "query.norm.weight": (24,), "query.norm.bias": (24,),
        "keys.weight": (3, 2, 8, 4), "values.weight": (64, 10),
    }  # fmt: skip


def test_triton_without_a_gpu_and_missing_packages_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from pkm.memory.kernels import backend

    monkeypatch.setattr(backend, "TRITON", True)
    with pytest.raises(UserError, match="CUDA"):
        build(kernels="triton")(torch.randn(1, 2, 10))
    monkeypatch.setattr(backend, "TRITON", False)
    with pytest.raises(UserError, match="not installed"):
        build(kernels="triton")


@pytest.mark.parametrize(
    "wanted, device, expected",
    [
        ("auto", "cpu", "torch"),
        ("auto", "mps", "reference"),
        ("auto", "cuda", "triton"),
        ("reference", "cuda", "reference"),
    ],
)
def test_kernels_are_chosen_by_device(wanted: str, device: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pkm.memory.kernels import backend

    monkeypatch.setattr(backend, "TRITON", True)
    chosen = backend.choose(wanted, torch.device(device))
    assert chosen.name == expected and str(chosen).startswith(expected)
    assert backend.choose(wanted, torch.device(device), torch.float64).name != "triton"


@pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="faiss is not installed")
@pytest.mark.parametrize("keys", ["product", "flat"])
def test_faiss_finds_the_same_slots_and_gives_the_same_output(keys: str) -> None:
    x = torch.randn(3, 20, 10)
    found = []
    for kernels in ("faiss", "reference"):
        layer = build(keys, kernels=kernels)
        layer.record = True
        out = layer(x)
        out.square().sum().backward()
        found.append((out, layer.selection[0].long(), layer.keys.weight.grad))
    (a, a_slots, a_grad), (b, b_slots, b_grad) = found
    assert torch.equal(a_slots, b_slots)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(a_grad, b_grad)
