import pytest
import torch

from pkm.inference.generate import pick

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


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_draws_the_same_ids(seed):
    def draws():
        rng = torch.Generator().manual_seed(seed)
        return [pick(LOGITS, 1.0, None, None, rng) for _ in range(20)]

    assert draws() == draws()
