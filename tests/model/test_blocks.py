"""Each block against an implementation of others: transformers' models, made from a config, with our weights."""

from __future__ import annotations

import math

import pytest
import torch

from pkm.corpus.store import open_corpus
from pkm.inference.trained import load_trained
from pkm.model.attention import rotate
from pkm.model.transformer import Transformer, build_model
from pkm.run.metrics import read
from tests.support.tiny import VOCAB_SIZE, everything, tiny_config

transformers = pytest.importorskip("transformers")

DIM, HEADS, LAYERS, FFN, CONTEXT = 32, 4, 3, 48, 24
OF_TODAY = {
    "layers": LAYERS, "dim": DIM, "heads": HEADS, "ffn": FFN, "norm": "pre", "norm_type": "rms", "norm_eps": 1e-6,
    "embedding_norm": False, "activation": "swiglu", "positions": "rotary", "bias": False, "tie_embeddings": False,
}  # fmt: skip


def model_of(**settings) -> Transformer:
    """Random weights everywhere: zeros and ones hide mistakes."""
    config = tiny_config(memory=None, corpus={"context": CONTEXT}, model=settings)
    model = build_model(config, VOCAB_SIZE).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return model


def ids(batch: int = 3, length: int = CONTEXT) -> torch.Tensor:
    return torch.randint(14, VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(1))


def theirs(name: str, **settings):
    """A model of transformers with the sizes above, that computes attention step by step."""
    shape = {
        "hidden_size": DIM, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "pad_token_id": None,
        "attn_implementation": "eager", "head_dim": DIM // HEADS, "tie_word_embeddings": False,
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**{**shape, **settings})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def give_weights(model: Transformer, other) -> None:
    """Ours to one of the Llama family; biases that it lacks must be absent here, or are set to zero."""
    given = {"model.embed_tokens.weight": model.tokens.weight, "model.norm.weight": model.final_norm.weight}
    given["lm_head.weight"] = model.output_weight
    size, groups = DIM // HEADS, model.blocks[0].attention.groups
    for i, block in enumerate(model.blocks):
        at, attention = f"model.layers.{i}.", block.attention
        split = [HEADS * size, groups * size, groups * size]
        for name, weight in zip("qkv", attention.qkv.weight.split(split), strict=True):
            given[f"{at}self_attn.{name}_proj.weight"] = weight
        if attention.qkv.bias is not None:
            for name, bias in zip("qkv", attention.qkv.bias.split(split), strict=True):
                given[f"{at}self_attn.{name}_proj.bias"] = bias
        given[f"{at}self_attn.o_proj.weight"] = attention.out.weight
        for name, norm in zip("qk", attention.norms, strict=False):
            given[f"{at}self_attn.{name}_norm.weight"] = norm.weight
        given[f"{at}input_layernorm.weight"] = block.norms[0].weight
        given[f"{at}post_attention_layernorm.weight"] = block.norms[1].weight
        feed_forward = block.feed_forward
        parts = {"gate": feed_forward.gate, "up": feed_forward.expand, "down": feed_forward.contract}
        for name, linear in parts.items():
            given[f"{at}mlp.{name}_proj.weight"] = linear.weight
    missing = other.load_state_dict({name: t.detach() for name, t in given.items()}, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}, missing


@torch.no_grad()
def assert_same_logits(model: Transformer, other, **settings) -> None:
    found, wanted = model.logits(model.hidden(ids())), other(ids(), **settings).logits
    assert wanted.abs().max() > 0.5
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_is_transformers(kv_heads, tied):
    model = model_of(**OF_TODAY | {"kv_heads": kv_heads, "tie_embeddings": tied})
    other = theirs("Llama", num_key_value_heads=kv_heads or HEADS, tie_word_embeddings=tied)
    give_weights(model, other)
    assert_same_logits(model, other)


@pytest.mark.parametrize("base", [500.0, 1e6])
def test_a_qwen3_with_norms_of_queries_and_keys_and_any_base_is_transformers(base):
    model = model_of(**OF_TODAY | {"kv_heads": 2, "qk_norm": True, "rotary": {"base": base}})
    rotary = {"rope_type": "default", "rope_theta": base}
    other = theirs("Qwen3", num_key_value_heads=2, rope_parameters=rotary)
    give_weights(model, other)
    assert_same_logits(model, other)


def test_a_qwen2_with_biases_of_queries_keys_and_values_alone_is_transformers():
    model = model_of(**OF_TODAY | {"kv_heads": 2, "bias": True})
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias") and "qkv" not in name:
                p.zero_()
    other = theirs("Qwen2", num_key_value_heads=2)
    give_weights(model, other)
    assert_same_logits(model, other)


def test_a_sliding_window_is_mistrals():
    model = model_of(**OF_TODAY | {"window": 5})
    other = theirs("Mistral", num_key_value_heads=HEADS, sliding_window=5)
    give_weights(model, other)
    assert_same_logits(model, other)
    assert not torch.allclose(model.hidden(ids()), model_without(model, window=None).hidden(ids()), atol=1e-3)


def model_without(model: Transformer, **settings) -> Transformer:
    """The same weights under other settings."""
    other = model_of(**model.config.model_dump() | settings)
    other.load_state_dict(model.state_dict())
    return other


def test_pairs_of_neighbours_are_heliums_and_those_of_halves_with_rows_in_another_order():
    model = model_of(**OF_TODAY | {"rotary": {"pairs": "neighbours", "base": 100_000.0}})
    other = theirs("Helium", num_key_value_heads=HEADS)
    give_weights(model, other)
    assert_same_logits(model, other)
    halves = model_without(model, rotary={"pairs": "halves", "base": 100_000.0})
    size = DIM // HEADS
    order = torch.arange(size).view(size // 2, 2).T.flatten()
    rows = (torch.arange(2 * HEADS).unsqueeze(1) * size + order).flatten()  # queries and keys of every head
    with torch.no_grad():
        for block in halves.blocks:
            block.attention.qkv.weight[: len(rows)] = block.attention.qkv.weight[rows]
    torch.testing.assert_close(halves.hidden(ids()), model.hidden(ids()), rtol=1e-5, atol=1e-5)


def test_turned_pairs_are_products_with_complex_numbers():
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angles = torch.rand(1, 1, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    turn = torch.polar(torch.ones_like(angles), angles)
    neighbours = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * turn).flatten(-2)
    torch.testing.assert_close(rotate(x, angles, "neighbours"), neighbours)
    halves = torch.complex(x[..., :4], x[..., 4:]) * turn
    torch.testing.assert_close(rotate(x, angles, "halves"), torch.cat([halves.real, halves.imag], -1))


@pytest.mark.parametrize("activation", ["gelu", "relu", "relu2"])
def test_a_gpt_2_with_learned_positions_layer_norm_and_any_activation_is_transformers(activation):
    settings = {"norm": "pre", "norm_eps": 1e-5, "embedding_norm": False, "activation": activation}
    model = model_of(layers=LAYERS, dim=DIM, heads=HEADS, ffn=FFN, **settings)
    config = transformers.GPT2Config(
        n_embd=DIM, n_layer=LAYERS, n_head=HEADS, n_inner=FFN, n_positions=CONTEXT, vocab_size=VOCAB_SIZE,
        activation_function=activation, attn_implementation="eager",
    )  # fmt: skip
    other = transformers.GPT2LMHeadModel(config).eval()
    given = {"wte": model.tokens.weight, "wpe": model.positions.weight}
    given |= {f"ln_f.{name}": p for name, p in model.final_norm.named_parameters()}
    given = {(name if "." in name else f"{name}.weight"): p for name, p in given.items()}
    for i, block in enumerate(model.blocks):
        ff = block.feed_forward
        linear = {"attn.c_attn": block.attention.qkv, "attn.c_proj": block.attention.out}
        linear |= {"mlp.c_fc": ff.expand, "mlp.c_proj": ff.contract}
        for name, part in linear.items():  # theirs are transposed
            given |= {f"h.{i}.{name}.weight": part.weight.T, f"h.{i}.{name}.bias": part.bias}
        for name, part in (("ln_1", block.norms[0]), ("ln_2", block.norms[1])):
            given |= {f"h.{i}.{name}.{key}": p for key, p in part.named_parameters()}
    with torch.no_grad():
        model.output_bias.zero_()
    missing = other.transformer.load_state_dict({name: t.detach().contiguous() for name, t in given.items()})
    assert not missing.missing_keys and not missing.unexpected_keys
    assert_same_logits(model, other)


def test_capped_logits_are_gemma_2s():
    model = model_of(**OF_TODAY | {"logit_cap": 2.0, "tie_embeddings": True})
    other = theirs("Gemma2", num_key_value_heads=HEADS, tie_word_embeddings=True, final_logit_softcapping=2.0)
    with torch.no_grad():
        other.model.embed_tokens.weight.copy_(model.tokens.weight)
        hidden = other.model(ids()).last_hidden_state
        found, wanted = model.logits(hidden), other(ids()).logits
    assert 1 < wanted.abs().max() < 2
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_without_positions_the_same_tokens_before_give_the_same_whatever_their_order():
    settings = {
        "layers": 1,
        "positions": "none",
        "norm": "pre",
    }  # one layer: those before are seen, not where they stand
    model, one = model_of(**settings), ids(2)
    other = torch.cat([one[:, :-1].flip(1), one[:, -1:]], 1)
    torch.testing.assert_close(model.hidden(one)[:, -1], model.hidden(other)[:, -1], rtol=1e-5, atol=1e-6)
    turned = model_of(**settings | {"positions": "rotary"})
    assert not torch.allclose(turned.hidden(one)[:, -1], turned.hidden(other)[:, -1], atol=1e-3)


SETTINGS = {
    "today": OF_TODAY | {"kv_heads": 2, "qk_norm": True},
    "2019": {"layers": LAYERS, "dim": DIM, "heads": HEADS},
    "none": {"layers": LAYERS, "dim": DIM, "heads": HEADS, "positions": "none", "window": 3},
}


@pytest.mark.parametrize("place", ["replace", "beside", "after"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_documents_of_a_window_are_read_as_if_they_were_apart(settings, place):
    config = tiny_config(
        memory={"place": place}, corpus={"context": CONTEXT}, model=SETTINGS[settings] | {"document_mask": True}
    )
    model = build_model(config, VOCAB_SIZE).eval()
    lengths, text = [5, 1, 11, 7], ids(1)
    documents = torch.arange(4).repeat_interleave(torch.tensor(lengths)).unsqueeze(0)
    together = model.hidden(text, documents=documents)
    apart = torch.cat([model.hidden(part) for part in text.split(lengths, 1)], 1)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(together, model.hidden(text), atol=1e-3)


@pytest.mark.parametrize("settings", SETTINGS)
def test_no_later_token_is_seen(settings):
    model, one = model_of(**SETTINGS[settings]), ids()
    other = one.clone()
    other[:, 9:] = one[:, 9:].flip(1)
    torch.testing.assert_close(model.hidden(one)[:, :9], model.hidden(other)[:, :9], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS)
def test_dropout_on_attention_weights_is_seldom_enough_the_attention_without(settings):
    model = model_of(**SETTINGS[settings] | {"dropout": 1e-9}).train()  # by the other way to compute it
    torch.testing.assert_close(model.hidden(ids()), model.eval().hidden(ids()), rtol=1e-3, atol=2e-3)


def test_swiglu_has_as_many_parameters_as_the_network_it_replaces():
    def weights(activation):
        model = model_of(**SETTINGS["2019"] | {"activation": activation, "bias": False, "dim": 96})
        return sum(p.numel() for p in model.blocks[0].feed_forward.parameters())

    assert weights("swiglu") == weights("gelu") == 8 * 96 * 96


def test_the_corpus_says_which_document_a_token_is_of(tiny_corpus_path):
    split = open_corpus(tiny_corpus_path).train
    wanted = [i for i in range(split.documents) for _ in range(split.document_start(i), split.document_start(i + 1))]
    offsets = torch.arange(split.tokens).view(-1, 8).numpy()
    assert split.documents_at(offsets).flatten().tolist() == wanted
    assert split.documents_at(offsets[-1:] + 8).tolist() == [[split.documents - 1] * 8]


MODERN = {
    **OF_TODAY, "layers": 2, "dim": 16, "heads": 2, "ffn": None, "kv_heads": 1, "qk_norm": True, "window": 6,
    "document_mask": True, "logit_cap": 20.0,
}  # fmt: skip


def test_all_of_them_together_train_and_resume_to_the_same_bits(train):
    model, optim, *_, directory = train(name="whole", model=MODERN)
    train(name="parts", model=MODERN, optim={"steps": 10})
    again, its_optim, *_ = train(name="parts", model=MODERN)
    ours, theirs = everything(model, optim), everything(again, its_optim)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    losses = [r["loss"] for r in read(directory / "metrics.jsonl") if r["kind"] == "train"]
    assert losses[-1] < 0.7 * losses[0]


def test_a_run_with_masked_documents_is_scored_with_them(train):
    *_, directory = train(model=MODERN)
    trained = load_trained(directory, "latest")
    split = trained.corpus.valid
    total = 0.0
    for start in range(0, split.tokens - 1, 8):
        text = torch.from_numpy(split.read(start, min(start + 9, split.tokens)))
        documents = split.documents_at(torch.arange(start, start + len(text)).numpy())
        for t in range(1, len(text)):
            first = next(i for i in range(t) if documents[i] == documents[t - 1])
            logits = trained.model.logits(trained.model.hidden(text[None, first:t]))[0, -1].double()
            total -= float(logits.log_softmax(-1)[text[t]])
    valid = [r["loss"] for r in read(directory / "metrics.jsonl") if r["kind"] == "valid"]
    assert math.isclose(valid[-1], total / (split.tokens - 1), rel_tol=1e-4)
