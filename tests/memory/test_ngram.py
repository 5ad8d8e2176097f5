"""Memories of n-grams (Engram, 2026), with the context's gate, and plain tables of bigrams."""

import numpy as np
import pytest
import torch

from pkm.config.schema import MemoryConfig
from pkm.corpus.store import open_corpus
from pkm.inference.export import export, load_exported
from pkm.inference.generate import Reader
from pkm.inference.trained import load_trained
from pkm.memory import hashing
from pkm.memory.layer import MemoryLayer
from pkm.memory.ngram import Back, NgramKeys, ShortConvolution, looking_back
from pkm.model import cost
from pkm.model.summary import summary
from pkm.model.transformer import Transformer, build_model, parameters
from pkm.text.canonical import canonical, canonical_ids
from pkm.text.vocab import Vocab
from tests.support.tiny import VOCAB_SIZE, tiny_config
from tests.support.whole_runs import many_and_one, straight_as_resumed, with_values

ENGRAM = {
    "layers": [1, 2], "keys": "ngram", "orders": [2, 3], "heads": 2, "slots": 30, "gate": "engram", "place": "before",
    "sub_keys": None,
}  # fmt: skip
BIGRAMS = {**ENGRAM, "orders": [2], "heads": 1, "gate": "none", "layers": [2]}
CONVOLVED = {**ENGRAM, "convolution": 2}
ALL = pytest.mark.parametrize("memory", [ENGRAM, BIGRAMS, CONVOLVED], ids=["Engram", "bigrams", "convolved"])

# Computed from the paper's rules (not by this code), at V' = 100, seed 0, [500, 500] rows, 2 heads, layers 1 and 15 (from 0),
# padding 2: of each layer its primes, its multipliers, and for canonical ids 3 7 9 3 7 each order's and head's row.
GOLDEN = {
    1: (
        (503, 509, 521, 523),
        (75936276614146333, 4795930018386233, 35633158494689637),
        [[473, 415, 249, 18, 415], [497, 84, 176, 202, 84], [484, 168, 149, 379, 279], [481, 142, 93, 115, 248]],
    ),
    15: (
        (541, 547, 557, 563),
        (28656513679687635, 55511705102368817, 53439361606171023),
        [[294, 218, 260, 242, 218], [6, 120, 4, 427, 120], [286, 21, 215, 100, 370], [25, 225, 329, 333, 182]],
    ),
}


def config(**more) -> MemoryConfig:
    return MemoryConfig(**{**ENGRAM, "heads": 2, "slots": 500, **more})


def awake(c, **more) -> Transformer:
    """A model whose convolutions are not 0, as they begin, for evaluation."""
    model = build_model(c, VOCAB_SIZE, **more).eval()
    for module in model.modules():
        if isinstance(module, ShortConvolution):
            torch.nn.init.normal_(module.weight)
    return model


def whole(ids: torch.Tensor) -> Back:
    """Of windows (B, T, n) that are one document each."""
    return Back(ids, torch.arange(ids.shape[1]).unsqueeze(0))


@pytest.mark.parametrize("index, layer", [(0, 1), (1, 15)])
def test_addresses_are_the_papers(index: int, layer: int) -> None:
    sizes, multipliers, expected = GOLDEN[layer]
    assert hashing.sizes(config(), index) == sizes
    assert hashing.multipliers(layer, 3, 100).tolist() == list(multipliers)
    keys = NgramKeys(config(), index, layer + 1)
    keys.know(100)
    back = looking_back(torch.tensor([[3, 7, 9, 3, 7]]), 3, torch.tensor(2), None, None)
    rows, weights = keys.select(back.flatten(0, 1), 1)
    offsets = torch.tensor([0, *np.cumsum(sizes)[:-1]])
    assert (rows.squeeze(-1) - offsets).T.tolist() == expected and (weights == 1).all()
    assert keys.slots == sum(sizes)


def test_pieces_that_read_alike_have_one_number_in_order_of_first_appearance() -> None:
    vocab = Vocab(
        ["The", "the@@", "caf\u00e9", "CAFE", "\ufb01", "fi@@", "a\ufffd", "A\ufffd", "<s"], [1] * 9, specials=()
    )
    assert canonical_ids(vocab).tolist() == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 8, 9]
    assert canonical(" \t ") == " " and canonical(" x\n") == "x" and canonical("\ud800") == "\ud800"


def test_a_token_is_looked_up_by_itself_and_those_before_it_in_its_document() -> None:
    ids, documents = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1]])
    plain = looking_back(ids, 3, torch.tensor(2), None, None)
    assert plain.tolist() == [[[5, 2, 2], [6, 5, 2], [7, 6, 5], [8, 7, 6]]]
    apart = looking_back(ids, 3, torch.tensor(2), None, documents)
    assert apart.tolist() == [[[5, 2, 2], [6, 5, 2], [7, 2, 2], [8, 7, 2]]]


@ALL
def test_no_token_changes_what_is_said_before_it_nor_in_another_document(memory: dict) -> None:
    c = tiny_config(memory={**memory, "values_std": 0.5}, model={"document_mask": True})
    model = awake(c)
    ids = torch.randint(14, VOCAB_SIZE, (1, 8))
    other = ids.clone()
    other[0, 3] = (ids[0, 3] - 14 + 1) % 36 + 14
    documents = torch.tensor([[0] * 5 + [1] * 3])
    rows = []
    for given in (ids, other):
        for _, m in model.memories():
            m.record = True
        with torch.no_grad():
            hidden = model.hidden(given, documents=documents)
        rows.append((model.memory(2).selection[0].squeeze(-1), hidden))
    longest = max(memory["orders"])
    changed = (rows[0][0] != rows[1][0]).any(-1).nonzero().squeeze(1).tolist()
    assert changed and set(changed) <= set(range(3, min(3 + longest, 5)))
    same = [0, 1, 2, 5, 6, 7]
    torch.testing.assert_close(rows[0][1][:, same], rows[1][1][:, same])
    assert not torch.allclose(rows[0][1][:, 3], rows[1][1][:, 3])


def test_what_is_read_is_gated_by_how_it_fits_the_context() -> None:
    torch.manual_seed(0)
    memory = MemoryLayer(config(slots=50), 12).double()
    memory.keys.know(40)
    with torch.no_grad():
        for norm in memory.output.norms:
            norm.weight.uniform_(0.5, 2)
    x, back = torch.randn(2, 5, 12).double(), whole(torch.randint(0, 40, (2, 5, 3)))
    memory.record = True
    out = memory(x, None, back)
    rows = memory.selection[0].squeeze(-1).unflatten(0, (2, 5))
    e = memory.values.weight[rows].flatten(-2)  # (B, T, J w)
    assert e.shape[-1] == 12
    w, v = memory.output.key.weight, memory.output.value.weight

    def rms(t: torch.Tensor, norm: torch.nn.RMSNorm) -> torch.Tensor:
        return t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

    a = torch.sigmoid(
        (rms(x, memory.output.norms[0]) * rms(e @ w.T, memory.output.norms[1])).sum(-1, keepdim=True) / 12**0.5
    )
    assert ((a > 0) & (a < 1)).all()
    torch.testing.assert_close(out, a * (e @ v.T))
    with torch.no_grad():
        w.zero_()
    torch.testing.assert_close(memory(x, None, back), 0.5 * e @ v.T)


def test_a_plain_table_is_summed_scaled_and_begins_as_nothing() -> None:
    c = tiny_config(memory=BIGRAMS)
    model, dense = build_model(c, VOCAB_SIZE).eval(), build_model(tiny_config(memory=None), VOCAB_SIZE).eval()
    dense.load_state_dict({n: t for n, t in model.state_dict().items() if n in dense.state_dict()})
    ids = torch.randint(14, VOCAB_SIZE, (2, 8))
    torch.testing.assert_close(model.hidden(ids), dense.hidden(ids))
    memory = model.memory(2)
    with torch.no_grad():
        memory.values.weight.normal_()
    memory.record = True
    model.hidden(ids)
    back = model._looking_back(ids, torch.arange(8).unsqueeze(0), None, None)
    expected = 0.1 * memory.values.weight[memory.selection[0].squeeze(-1)].sum(1)
    torch.testing.assert_close(memory(torch.zeros(2, 8, 16), None, back).flatten(0, 1), expected)


def test_a_convolution_is_what_the_formula_says_over_the_tokens_of_the_document_alone() -> None:
    torch.manual_seed(0)
    convolution = ShortConvolution(6, 3, 2).double()
    u = torch.randn(2, 11, 6, dtype=torch.float64)
    documents = torch.tensor([[0] * 11, [0] * 4 + [1] * 7])
    reach = torch.tensor([[*range(11)], [*range(4), *range(7)]])
    back = Back(torch.zeros(2, 11, 1), reach)
    assert torch.equal(convolution(u, back), u)  # as it begins
    with torch.no_grad():
        convolution.weight.normal_()
        convolution.norm.weight.uniform_(0.5, 2)
    r = u / (u.square().mean(-1, keepdim=True) + 1e-6).sqrt() * convolution.norm.weight
    expected = u.clone()
    for b in range(2):
        for t in range(11):
            taps = [i for i in range(3) if t >= 2 * i and documents[b, t - 2 * i] == documents[b, t]]
            s = sum(convolution.weight[i] * r[b, t - 2 * i] for i in taps)
            expected[b, t] += s * torch.sigmoid(s)
    torch.testing.assert_close(convolution(u, back), expected)
    # Of a text that is one document torch's own convolution is the same.
    kernel = convolution.weight.flip(0).T.unsqueeze(1)
    s = torch.nn.functional.conv1d(r[:1].mT, kernel, padding=4, dilation=2, groups=6)[..., :11].mT
    torch.testing.assert_close(convolution(u, back)[:1], u[:1] + torch.nn.functional.silu(s))
    inputs = u.requires_grad_()
    assert torch.autograd.gradcheck(lambda u, *_: convolution(u, back), (inputs, *convolution.parameters()))


def test_a_convolution_that_has_learnt_nothing_changes_no_bit_and_its_settings_draw_no_number() -> None:
    ids = torch.randint(14, VOCAB_SIZE, (2, 8))
    plain, convolved = (build_model(tiny_config(memory=m), VOCAB_SIZE).eval() for m in (ENGRAM, CONVOLVED))
    assert torch.equal(plain.hidden(ids), convolved.hidden(ids))
    assert {n for n in convolved.state_dict()} - {n for n in plain.state_dict()} == {
        f"blocks.{i}.memory.convolution.{name}" for i in range(2) for name in ("weight", "norm.weight")
    }


def test_padding_gets_nothing_from_a_convolution() -> None:
    model = awake(tiny_config(memory={**CONVOLVED, "values_std": 0.5}))
    memory, back = model.memory(2), whole(torch.randint(0, 30, (1, 8, 3)))
    x, mask = torch.randn(1, 8, 16), torch.tensor([[True] * 5 + [False] * 3])
    out = memory(x, mask, back)
    assert not out[:, 5:].any()
    torch.testing.assert_close(out[:, :5], memory(x, None, back)[:, :5])


@pytest.mark.parametrize("together", [False, True], ids=["one document", "documents"])
def test_compiled_with_a_convolution_a_block_is_one_graph_and_computes_the_same(together: bool) -> None:
    c = tiny_config(memory={**CONVOLVED, "values_std": 0.5}, model={"document_mask": together})
    ids, found = torch.randint(14, VOCAB_SIZE, (2, 8)), []
    documents = torch.tensor([[0] * 5 + [1] * 3] * 2) if together else None
    for compiled in (False, True):
        torch.manual_seed(0)
        model = awake(c).train()
        for block in model.blocks if compiled else ():
            block.compile(fullgraph=True, backend="aot_eager")  # a graph break is an error
        loss = model(ids[:, :-1], ids[:, 1:], None, None if documents is None else documents[:, :-1])
        loss.backward()
        found.append((loss, *(p.grad for p in model.memory(2).parameters())))
    torch.testing.assert_close(found[1], found[0])


@ALL
def test_a_text_that_is_read_token_by_token_is_read_as_it_is_whole(memory: dict) -> None:
    model = awake(tiny_config(memory={**memory, "values_std": 0.5}))
    ids = torch.randint(14, VOCAB_SIZE, (3, 16))
    with torch.no_grad():
        reader = Reader(model, ids[:, :3])
        for length in range(3, 16):  # and beyond the context of 8, where it begins anew
            logits = reader.logits()
            window = reader.ids[:, -reader._past.length :]
            expected = model.logits(model.hidden(window)[:, -1])
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
            reader.append(ids[:, length : length + 1])


@ALL
def test_parameters_and_work_are_counted(memory: dict) -> None:
    c = tiny_config(memory=memory)
    found, model = cost.parameters(c, VOCAB_SIZE), build_model(c, VOCAB_SIZE)
    assert (found.dense, found.values) == parameters(model)
    assert found.total == sum(p.numel() for p in model.parameters())
    assert found.query == found.keys == cost.traffic(c, VOCAB_SIZE, 2).batch_norm == 0
    assert any("hashes of the last" in remark for _, _, remark in summary(c, VOCAB_SIZE))
    work = cost.flops(c, VOCAB_SIZE)
    # 4 rows of 4 numbers, or one of 16; the gate's two maps 16 -> 16 and its product, or the scale; two tokens' convolution.
    gated = 2 * 16 + 4 * 16 * 16 + 2 * 16
    assert (
        work.read
        == {"engram": 2 * (gated + (2 * 2 * 16 if memory is CONVOLVED else 0)), "none": 2 * 16 + 16}[memory["gate"]]
    )


def test_the_table_of_the_papers_27b_model_has_5_8_billion_numbers() -> None:
    memory = {**ENGRAM, "layers": [2, 15], "heads": 8, "slots": 2_262_400, "values_dim": 80}
    found = cost.parameters(tiny_config(model={"layers": 30, "dim": 2560, "heads": 20}, memory=memory), 1000).values
    assert found == pytest.approx(2 * 2 * 8 * 2_262_400 * 80, rel=1e-3)


@ALL
def test_it_trains_and_a_resumed_run_is_the_same_to_the_last_bit_and_can_be_exported(
    train, tmp_path, memory: dict
) -> None:
    model, theirs, records, straight = straight_as_resumed(train, memory=memory)
    assert list(records[-1]["memories"]) == [str(layer) for layer in memory["layers"]]
    moved = {name: t.abs().sum() > 0 for name, t in theirs.items() if name.endswith("values.weight.mean")}
    assert moved and all(moved.values())
    found = load_trained(straight, "latest")
    export(found, tmp_path / "exported")
    ids = torch.randint(14, VOCAB_SIZE, (1, 8))
    with torch.no_grad():
        expected = model.eval().hidden(ids)
        torch.testing.assert_close(found.model.hidden(ids), expected)
        torch.testing.assert_close(load_exported(tmp_path / "exported").model.hidden(ids), expected)


def test_ids_that_read_alike_are_one_in_a_trained_model(train, tiny_corpus_path) -> None:
    model, *_ = train(name="a", memory=ENGRAM, optim={"steps": 1})
    vocab = open_corpus(tiny_corpus_path).vocab
    assert model.canonical.tolist() == canonical_ids(vocab).tolist()
    expected = hashing.multipliers(1, 3, int(model.canonical.max()) + 1)
    assert model.memory(2).keys.multipliers.tolist() == expected.tolist()


@pytest.mark.parametrize("values", ["replicated", "sharded"])
@ALL
def test_two_ranks_train_it_as_one_does(tiny_corpus_path, tmp_path, values: str, memory: dict) -> None:
    both = many_and_one(with_values(values, tiny_corpus_path, tmp_path, memory=memory), ranks=2, steps=4)
    table = "blocks.1.memory.values.weight"
    both.assert_close(f"model.{table}", f"optim.values.{table}.mean")
    if memory is CONVOLVED:
        both.assert_close(learnt := "model.blocks.1.memory.convolution.weight")
        assert both.many[learnt].abs().min() > 0
    used = both.reports[0]["evaluation"]["memories"]["2"]
    assert 0 < used["percent"] <= 100 and used["shared_by_two_heads"] == 0
