from functools import partialmethod

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from pkm.corpus.batches import IGNORE
from pkm.model.transformer import Block, build_model
from pkm.text.vocab import PAD_ID
from pkm.train.optim import build_optimizers
from tests.support.tiny import VOCAB_SIZE, tiny_config


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def trained_looking(model):
    """Random weights everywhere, running statistics included: zeros and ones hide mistakes."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.rand(tensor.shape, generator=generator) * 0.1)
    return model


def test_a_dense_models_parameters_are_those_counted_by_hand():
    config = tiny_config(memory=None)
    embeddings = (
        50 * 16 + 50 + 8 * 16 + 2 * 16
    )  # tokens (tied with the output), output bias, positions, their LayerNorm
    block = (16 * 48 + 48) + (16 * 16 + 16) + (16 * 64 + 64) + (64 * 16 + 16) + 2 * 2 * 16
    assert parameters(build_model(config, VOCAB_SIZE)) == embeddings + 2 * block


@pytest.mark.parametrize(
    ("place", "beyond"),
    # what the block has besides attention and its LayerNorm: FFN 2,128, memory, LayerNorms of 32
    [("replace", 32), ("beside", 2128 + 32), ("after", 2128 + 2 * 32)],
)
def test_a_memory_models_parameters_are_those_counted_by_hand(place, beyond):
    config = tiny_config(memory={"place": place})
    embeddings = 50 * 16 + 50 + 8 * 16 + 2 * 16
    attention = (16 * 48 + 48) + (16 * 16 + 16) + 2 * 16
    ffn = (16 * 64 + 64) + (64 * 16 + 16)
    query = 16 * (2 * 8) + 2 * 8 + 2 * (2 * 8)  # linear with bias to H * q features, BatchNorm over them
    memory = query + 2 * 2 * 8 * 4 + 64 * 16  # + sub-keys H x 2 x C x q/2 + values K x d
    assert parameters(build_model(config, VOCAB_SIZE)) == embeddings + 2 * attention + (ffn + 32) + memory + beyond


def test_pre_norm_adds_one_layer_norm_at_the_end():
    post, pre = (parameters(build_model(tiny_config(model={"norm": norm}), VOCAB_SIZE)) for norm in ("post", "pre"))
    assert pre - post == 2 * 16


@pytest.mark.parametrize("place", ["replace", "beside", "after"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_no_earlier_output_moves_when_a_later_token_changes(place, norm):
    config = tiny_config(memory={"place": place, "query": {"dim": 8, "norm": "batch"}}, model={"norm": norm})
    model = trained_looking(build_model(config, VOCAB_SIZE)).eval()
    ids = torch.randint(14, VOCAB_SIZE, (3, 8), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[:, 5] = (ids[:, 5] - 14 + 1) % (VOCAB_SIZE - 14) + 14
    with torch.no_grad():
        before, after = model.hidden(ids), model.hidden(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-6)
    assert (before[:, 5:] - after[:, 5:]).abs().amax() > 1e-3


def test_what_a_mask_calls_padding_changes_neither_loss_nor_gradients_nor_batchnorm():
    config = tiny_config()
    ids = torch.randint(14, VOCAB_SIZE, (4, 6), generator=torch.Generator().manual_seed(1))
    targets = torch.randint(14, VOCAB_SIZE, (4, 6), generator=torch.Generator().manual_seed(2))
    padded_ids = torch.cat([ids, torch.full((4, 2), PAD_ID)], 1)
    padded_targets = torch.cat([targets, torch.full((4, 2), IGNORE)], 1)
    found = []
    for inputs, wanted, mask in ((ids, targets, None), (padded_ids, padded_targets, padded_ids != PAD_ID)):
        model = build_model(config, VOCAB_SIZE).train()
        loss = model(inputs, wanted, mask)
        loss.backward()
        found.append(
            (loss.detach(), model.blocks[1].memory.query.state_dict(), model.blocks[0].attention.qkv.weight.grad)
        )
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_sum_over_scored_targets():
    model = build_model(tiny_config(), VOCAB_SIZE).eval()
    ids = torch.randint(14, VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1)
    targets[:, -1] = IGNORE
    log_probabilities = model.logits(model.hidden(ids)).double().log_softmax(-1)
    expected = -sum(log_probabilities[b, t, targets[b, t]] for b in range(2) for t in range(7))
    torch.testing.assert_close(model(ids, targets).double(), expected, rtol=1e-5, atol=1e-5)


def test_the_same_seed_builds_the_same_weights_and_another_seed_others():
    one, same, other = (build_model(tiny_config(seed=seed), VOCAB_SIZE).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["tokens.weight"], other["tokens.weight"])


def test_memories_stand_where_the_config_puts_them():
    config = tiny_config(model={"layers": 16}, memory={"layers": None, "count": 2})
    assert [layer for layer, _ in build_model(config, VOCAB_SIZE).memories()] == [6, 12]


def test_dropout_is_active_in_training_only():
    model = build_model(tiny_config(model={"dropout": 0.5}), VOCAB_SIZE)
    ids = torch.randint(14, VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(1))
    model.eval()
    assert torch.equal(model.hidden(ids), model.hidden(ids))
    model.train()
    assert not torch.equal(model.hidden(ids), model.hidden(ids))


TODAY = {
    "kv_heads": 1, "qk_norm": True, "window": 5, "positions": "rotary", "norm_type": "rms", "activation": "swiglu",
    "bias": False,
}  # fmt: skip


@pytest.mark.parametrize("place, blocks", [("replace", {}), ("beside", {}), ("after", {}), ("replace", TODAY)])
def test_a_compiled_block_is_one_graph_and_computes_the_same(place, blocks):
    config = tiny_config(memory={"place": place}, model=blocks)
    ids = torch.randint(14, VOCAB_SIZE, (4, 8), generator=torch.Generator().manual_seed(1))
    found = []
    for compiled in (False, True):
        model = build_model(config, VOCAB_SIZE).train()
        if compiled:
            for block in model.blocks:
                block.compile(fullgraph=True, backend="aot_eager")  # a graph break is an error
        model.memory(2).record = True
        loss = model(ids, ids)
        loss.backward()
        found.append((loss.detach(), model.blocks[0].attention.qkv.weight.grad, model.memory(2).selection[1].detach()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_memories_that_share_compiled_code_keep_their_gradients_apart():
    config = tiny_config(model={"layers": 3}, memory={"layers": [1, 2, 3]})
    ids = torch.randint(14, VOCAB_SIZE, (4, 8), generator=torch.Generator().manual_seed(1))
    found = []
    for compiled in (False, True):
        model = build_model(config, VOCAB_SIZE).train()
        build_optimizers(config.optim, model)
        if compiled:
            torch._dynamo.reset()
            for block in model.blocks:
                block.compile(fullgraph=True, backend="aot_eager")
        model(ids, ids).backward()
        found.append([memory.values.gradient() for _, memory in model.memories()])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(found[1][0].rows, found[1][1].rows)


def test_plain_steps_logged_steps_and_evaluations_compile_without_breaks_and_once_for_all_memories(train, monkeypatch):
    compiled = {}
    # Beyond 8 versions of one function torch leaves it uncompiled, with no more than a warning.
    for memories, update in ((1, "sparse"), (5, "sparse"), (5, "dense"), (5, "in_backward")):
        torch._dynamo.reset()
        counters.clear()
        counter = CompileCounter()
        monkeypatch.setattr(Block, "compile", partialmethod(torch.nn.Module.compile, backend=counter))
        train(
            name=f"{memories}-{update}",
            compile=True,
            model={"layers": memories + 1},
            memory={"layers": list(range(2, memories + 2))},
            optim={"steps": 4, "values": {"update": update}},
            log={"every_steps": 2},
            evaluate={"every_steps": 2},
        )
        assert not counters["graph_break"]
        compiled[memories, update] = counter.frame_count
    assert 0 < min(compiled.values()) == max(compiled.values()), compiled
