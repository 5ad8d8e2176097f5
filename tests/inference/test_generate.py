from itertools import pairwise

import pytest
import torch

from pkm.corpus.store import open_corpus
from pkm.errors import UserError
from pkm.inference.generate import Reader, generate, pick
from pkm.model.transformer import build_model
from pkm.text.vocab import EOS_ID
from tests.support.tiny import VOCAB_SIZE, tiny_config

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def drawn(n=2000, **settings):
    rng = torch.Generator().manual_seed(0)
    return [pick(LOGITS, rng=rng, **{"temperature": 1.0, "top_k": None, "top_p": None, **settings}) for _ in range(n)]


def test_temperature_zero_takes_the_most_likely():
    assert set(drawn(5, temperature=0)) == {1}


def test_samples_follow_the_softmax():
    expected = LOGITS.softmax(0)
    found = torch.bincount(torch.tensor(drawn()), minlength=5) / 2000
    torch.testing.assert_close(found, expected, rtol=0, atol=0.04)


def test_top_k_samples_from_the_k_most_likely_only():
    assert set(drawn(top_k=2)) == {1, 3}
    assert set(drawn(5, top_k=1)) == {1}


def test_top_p_samples_from_the_smallest_set_that_holds_it():
    # softmax: 0.64 (id 1), 0.23 (id 3), 0.09 (id 2), ...
    assert set(drawn(top_p=0.5)) == {1}
    assert set(drawn(top_p=0.7)) == {1, 3}
    assert set(drawn(top_p=1.0)) == {0, 1, 2, 3, 4}


def test_a_low_temperature_sharpens():
    assert drawn(temperature=0.25).count(1) > drawn().count(1)


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-30])
def test_the_lowest_temperatures_take_the_most_likely_as_0_does(temperature):
    assert set(drawn(n=50, temperature=temperature)) == {1}


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_draws_the_same_ids(seed):
    def draws():
        rng = torch.Generator().manual_seed(seed)
        return [pick(LOGITS, 1.0, None, None, rng) for _ in range(20)]

    assert draws() == draws()


CONTEXT = 16


def untrained(dtype=torch.float32, **sections):
    sections = {"corpus": {"context": CONTEXT}, "model": {"layers": 3}, **sections}
    model = build_model(tiny_config(**sections), VOCAB_SIZE).to(dtype).eval()
    for p in model.parameters():  # far from uniform: what is not the same shows
        p.data.mul_(3)
    return model


def window(ids, prompt):
    """What the model sees of texts that began with so many tokens of a prompt: a full window begins anew with its last half."""
    length = min(len(ids[0]), CONTEXT)
    for _ in range(max(prompt, CONTEXT), len(ids[0])):
        length = length + 1 if length < CONTEXT else CONTEXT // 2
    return ids[:, len(ids[0]) - length :]


@torch.no_grad()
def sampled(model, prompt, tokens, seeds, temperature, cached):
    """Ids (B, T), and the logits of every step; without a cache every token is read again in every step."""
    ids, rngs, seen = prompt.expand(len(seeds), -1), [torch.Generator().manual_seed(s) for s in seeds], []
    reader = Reader(model, ids)
    for _ in range(tokens):
        logits = reader.logits() if cached else model.logits(model.hidden(window(ids, prompt.shape[1]))[:, -1])
        seen.append(logits)
        picked = [[pick(row, temperature, None, None, rng)] for row, rng in zip(logits, rngs, strict=True)]
        reader.append(torch.tensor(picked))
        ids = torch.cat([ids, torch.tensor(picked)], dim=1)
    return ids, torch.stack(seen)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("prompt", [1, 5, CONTEXT, 3 * CONTEXT])
@pytest.mark.parametrize("norm, dtype", [("pre", torch.float32), ("post", torch.float32), ("pre", torch.float64)])
def test_with_kept_keys_and_values_the_same_ids_come_as_without_also_past_the_contexts_end(
    temperature, prompt, norm, dtype
):
    model = untrained(dtype, model={"norm": norm, "layers": 3})
    start = torch.randint(14, VOCAB_SIZE, (1, prompt), generator=torch.Generator().manual_seed(1))
    (ids, logits), (expected, without) = (
        sampled(model, start, 3 * CONTEXT, range(4), temperature, cached) for cached in (True, False)
    )
    assert torch.equal(ids, expected)
    if dtype is torch.float64:  # where no rounding hides what is not the same
        torch.testing.assert_close(logits, without.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prompt", [1, 3 * CONTEXT])
@pytest.mark.parametrize(
    "model",
    [
        {"positions": "rotary", "kv_heads": 1, "qk_norm": True},
        {"positions": "none", "window": 3},
        {
            "positions": "rotary",
            "norm_type": "rms",
            "activation": "swiglu",
            "bias": False,
            "logit_cap": 5.0,
            "window": 9,
        },
        {"positions": "rotary", "experts": {"count": 4}},
    ],
    ids=["shared keys", "window", "of today", "experts"],
)
def test_kept_keys_and_values_fit_every_block(model, prompt):
    model = untrained(torch.float64, model={"norm": "pre", "layers": 3, "tie_embeddings": False, **model})
    start = torch.randint(14, VOCAB_SIZE, (1, prompt), generator=torch.Generator().manual_seed(1))
    (ids, logits), (expected, without) = (
        sampled(model, start, 3 * CONTEXT, range(2), 1.0, cached) for cached in (True, False)
    )
    assert torch.equal(ids, expected)
    torch.testing.assert_close(logits, without.float(), rtol=1e-5, atol=1e-6)


def test_a_sample_depends_on_its_own_seed_alone():
    model, start = untrained(), torch.tensor([[EOS_ID, 20, 21]])
    together, _ = sampled(model, start, 30, [3, 4, 5], 1.0, cached=True)
    alone = [sampled(model, start, 30, [seed], 1.0, cached=True)[0] for seed in (3, 4, 5)]
    assert torch.equal(together, torch.cat(alone))
    assert not torch.equal(together[0], together[1])


def test_a_token_is_read_once_but_for_half_a_context_where_the_window_begins_anew(monkeypatch):
    model, read = untrained(), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, **more: read.append(ids.shape[1]) or hidden(ids, **more))
    sampled(model, torch.full((1, 3), 20), 3 * CONTEXT, [0], 1.0, cached=True)
    anew = [i for i, tokens in enumerate(read) if tokens > 1][1:]
    assert read[0] == 3 and all(read[i] == CONTEXT // 2 for i in anew)
    assert len(anew) == 4 and [b - a for a, b in pairwise(anew)] == [CONTEXT // 2 + 1] * 3


def test_texts_begin_with_the_prompt_and_settings_out_of_range_are_refused(tiny_corpus_path):
    encoder = open_corpus(tiny_corpus_path).encoder()
    model = build_model(tiny_config(), encoder.vocab.size)
    texts = generate(model, encoder, "a", 12, seeds=[1, 2, 1])
    assert len(texts) == 3 and texts[0] == texts[2]
    with pytest.raises(UserError, match="samples = 0"):
        generate(model, encoder, "a", 1, seeds=[])
