"""Text from a trained model: sample a next id, append it, look again."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from pkm.errors import UserError
from pkm.model.transformer import Transformer
from pkm.text.encode import Encoder
from pkm.text.vocab import EOS_ID


def pick(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, rng: torch.Generator) -> int:
    """Sample an id from logits (V,): tempered, of the `top_k` most likely, of the smallest set that holds `top_p` (Holtzman
    et al., 2020). A temperature of 0 takes the most likely id."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, ids = (logits.double() / temperature).softmax(0).sort(descending=True, stable=True)
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if top_k is not None:
        keep[top_k:] = False
    if top_p is not None:
        keep &= (
            probabilities.cumsum(0) - probabilities < top_p
        )  # the first id that passes top_p still belongs to the set
    return int(ids[torch.multinomial(probabilities * keep, 1, generator=rng)])


@torch.no_grad()
def generate(
    model: Transformer,
    encoder: Encoder,
    prompt: str,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """Go on from `prompt` by `tokens` ids; readable text, the prompt's included.

    The model sees the last `context` ids. Special ids other than the end of a line are never sampled.
    Raises UserError for settings out of range.
    """
    for name, value, allowed in (
        ("temperature", temperature, temperature >= 0),
        ("top-k", top_k, top_k is None or top_k >= 1),
        ("top-p", top_p, top_p is None or 0 < top_p <= 1),
        ("tokens", tokens, tokens >= 1),
    ):
        if not allowed:
            raise UserError(
                f"{name} = {value} is out of range",
                f"--{name}",
                "temperature >= 0, top-k >= 1, 0 < top-p <= 1, tokens >= 1",
            )
    device = next(model.parameters()).device
    rng = torch.Generator().manual_seed(seed)
    encoded = array("I")
    encoder.encode(prompt, encoded)
    ids = [EOS_ID, *encoded[:-1]]  # the prompt's line goes on: without the </s> that ends it
    model.eval()
    for _ in range(tokens):
        window = torch.tensor([ids[-model.context :]], device=device)
        logits = model.logits(model.hidden(window)[0, -1]).float().cpu()
        logits[[i for i in range(encoder.vocab.first) if i != EOS_ID]] = -torch.inf
        ids.append(pick(logits, temperature, top_k, top_p, rng))
    return encoder.decode(ids[1:])
