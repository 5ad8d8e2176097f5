"""What numba compiles selects the same as the reference, bit for bit, and computes the same as plain PyTorch."""

import pytest
import torch

from pkm.memory.kernels import cpu, reference
from pkm.memory.kernels.adam_step import AdamStep, update

ALWAYS, NEVER = 0, 1 << 62


@pytest.fixture
def compiled(monkeypatch):
    """Calls a function with compiled loops, and without."""
    pytest.importorskip("numba")

    def both(run):
        found = []
        for numbers in (ALWAYS, NEVER):
            monkeypatch.setattr(cpu, "COMPILED_FROM", numbers)
            found.append(run())
        return found

    return both


def scores_of(kind, shape):
    heads, tokens, sub_keys = shape
    scores = torch.randn(heads, 2, tokens, sub_keys)
    if kind == "ties":
        return torch.randint(-2, 3, scores.shape).float()
    if kind == "all equal":
        return torch.full_like(scores, -1.5)
    if kind == "zeros":
        return torch.where(scores > 0, 0.0, -0.0)
    if kind == "nan":
        scores[:, :, ::2, sub_keys // 2] = float("nan")
    elif kind == "infinite":
        scores[:, 0, :, 0], scores[:, 1, :, sub_keys // 2] = float("inf"), float("-inf")
    elif kind == "huge":
        return scores * 2.0**127
    elif kind == "tiny":
        return scores * 2.0**-140  # numbers below the least normal one
    elif kind == "far apart":  # sums that fp64 rounds
        return scores * 2.0 ** torch.randint(-60, 60, scores.shape)
    elif kind == "close":  # neighbours in fp32 around a large number: sums that rounding makes equal
        return 1000 + torch.randint(0, 40, scores.shape) * 2.0**-13
    elif kind == "one above all":  # that halving the range of numbers leaves among few
        scores[..., sub_keys // 3] = 1e30
    return scores


KINDS = [
    "random",
    "ties",
    "all equal",
    "zeros",
    "nan",
    "infinite",
    "huge",
    "tiny",
    "far apart",
    "close",
    "one above all",
]
SHAPES = [(3, 5, 16, 4), (1, 1, 12, 12), (5, 4, 1, 1), (4, 3, 48, 12), (2, 7, 300, 9), (2, 3, 130, 64), (1, 0, 8, 3)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_search_selects_what_the_reference_selects_to_the_bit(kind, shape, threads, compiled, monkeypatch):
    *sizes, k = shape
    scores = scores_of(kind, sizes)
    monkeypatch.setattr(cpu, "SORTED_AT_ONCE", 2 * sizes[-1])  # several parts, the last one shorter
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    bias = torch.randn(sizes[0], 2, sizes[-1]) if kind == "random" else torch.zeros(sizes[0], 2, sizes[-1])
    (slots, weights), (plain_slots, plain_weights) = compiled(lambda: cpu.search(scores, bias, k))
    expected, best = reference.select_product((scores + bias.unsqueeze(2)).permute(2, 0, 1, 3).contiguous(), k)
    assert torch.equal(slots.long(), expected) and torch.equal(plain_slots.long(), expected)
    torch.testing.assert_close(weights, best.softmax(-1), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(plain_weights, weights, rtol=0, atol=0, equal_nan=True)


def test_random_and_tied_rows_are_selected_without_the_reference(compiled, monkeypatch):
    """Else an error in what is compiled would hide behind rows that are settled the long way."""
    monkeypatch.setattr(reference, "select_product", None)
    for kind in ("random", "ties", "all equal", "zeros", "close"):
        monkeypatch.setattr(cpu, "COMPILED_FROM", ALWAYS)
        cpu.search(scores_of(kind, (2, 40, 64)), torch.zeros(2, 2, 64), 8)


def test_the_selected_sub_keys_gradients_are_those_of_all_scores(compiled):
    tokens, heads, sub_keys, half, k = 37, 3, 10, 6, 4
    query, keys = torch.randn(tokens, heads, 2 * half), torch.randn(heads, 2, sub_keys, half)
    slots = torch.randint(0, sub_keys**2, (tokens, heads, k), dtype=torch.int32)
    by_scores = torch.randn(tokens, heads, k)
    whole = torch.zeros(tokens, heads, 2, sub_keys)
    for side, places in enumerate((slots // sub_keys, slots % sub_keys)):
        whole[:, :, side].scatter_add_(-1, places.long(), by_scores)
    expected = (
        torch.einsum("nhsc,hscw->nhsw", whole, keys).flatten(2),
        torch.einsum("nhsc,nhsw->hscw", whole, query.unflatten(-1, (2, half))),
        whole.sum(0),
    )
    for found in compiled(lambda: cpu.search_backward(by_scores, slots, query, keys)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    rounded = compiled(lambda: cpu.search_backward(by_scores, slots, query.bfloat16(), keys.bfloat16()))
    for found in rounded:
        assert found[0].dtype is found[1].dtype is torch.bfloat16 and found[2].dtype is torch.float32
        torch.testing.assert_close([t.float() for t in found], list(expected), rtol=0.05, atol=0.1)


@pytest.mark.parametrize("reads", [1, 3, 8, 13])
@pytest.mark.parametrize("slots", [5, 40, 100_000])
def test_reads_are_sorted_and_multiplied_as_in_the_reference_also_where_an_index_reads_nothing(reads, slots, compiled):
    indices = torch.randint(-1, slots, (29, reads), dtype=torch.int32)
    indices[:, 0] = slots - 1
    indices[3] = -1
    table, grad, weights = torch.randn(slots, 18), torch.randn(29, 18), torch.randn(29, reads)
    dots = reference.weight_gradient(grad, table, indices)
    rows, values = reference.row_gradient(grad, indices, weights)
    for found in compiled(lambda: cpu.weight_gradient(grad, table, indices)):
        torch.testing.assert_close(found, dots, rtol=1e-5, atol=1e-5)
    for found_rows, found_values in compiled(lambda: cpu.row_gradient(grad, indices, weights)):
        assert torch.equal(found_rows, rows)
        torch.testing.assert_close(found_values, values, rtol=1e-5, atol=1e-5)


def test_no_read_at_all_has_no_rows(compiled):
    indices = torch.full((3, 2), -1, dtype=torch.int32)
    for rows, values in compiled(lambda: cpu.row_gradient(torch.randn(3, 4), indices, torch.randn(3, 2))):
        assert len(rows) == 0 and values.shape == (0, 4)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_compiled_adam_moves_the_rows_as_plain_pytorch_does_and_no_others(threads, compiled, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    table, mean, rows = torch.randn(30, 9), 0.1 * torch.randn(30, 9), torch.tensor([0, 3, 4, 11, 29])
    square, grad = torch.rand(30, 9), torch.randn(5, 9)

    def moved():
        tensors = [t.clone() for t in (table, mean, square)]
        update(rows, grad, tensors[0], AdamStep(tensors[1], tensors[2], None, 1e-2, (0.9, 0.999), 1e-8, 3, 7))
        return tensors

    ours, plain = compiled(moved)
    for a, b, before in zip(ours, plain, (table, mean, square), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        others = [i for i in range(30) if i not in rows]
        assert torch.equal(a[others], before[others]) and (a[rows] != before[rows]).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_of_each_row_are_those_of_a_stable_sort_ties_and_nan_included(kind, shape, compiled, monkeypatch):
    *sizes, k = shape
    values = scores_of(kind, sizes)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    for given in (values, values.double(), values.transpose(0, 2)):
        wanted = expected.transpose(0, 2) if given.shape != values.shape else expected
        assert all(torch.equal(found, wanted) for found in compiled(lambda given=given: cpu.top(given, k)))
