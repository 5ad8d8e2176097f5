"""Texts from a trained model: sample a next id of each, append them, look again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pkm.errors import UserError
from pkm.model.attention import Past
from pkm.model.transformer import Transformer
from pkm.text.encode import Encoder
from pkm.text.library import LibraryEncoder


def pick(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, rng: torch.Generator) -> int:
    """Sample an id from logits (V,): tempered, of the `top_k` most likely, of the smallest set that holds `top_p` (Holtzman
    et al., 2020). A temperature of 0 takes the most likely id."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, ids = ((logits.double() - logits.max()) / temperature).softmax(0).sort(descending=True, stable=True)
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if top_k is not None:
        keep[top_k:] = False
    if top_p is not None:
        keep &= probabilities.cumsum(0) - probabilities < top_p  # the first id that passes top_p is still one of them
    return int(ids[torch.multinomial(probabilities * keep, 1, generator=rng)])


def generate(
    model: Transformer,
    encoder: Encoder | LibraryEncoder,
    prompt: str,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seeds: Sequence[int] = (0,),
) -> list[str]:
    """Go on from `prompt` by `tokens` ids, once for each of `seeds`, all at once; readable texts, the prompt's included.

    A sample depends on its own seed alone. Special ids are never sampled, but for the end
    of a line (of a document, with a tokenizer of the `tokenizers` library).
    Raises UserError for settings out of range.
    """
    for name, value, allowed in (
        ("temperature", temperature, 0 <= temperature < math.inf),
        ("top-k", top_k, top_k is None or top_k >= 1),
        ("top-p", top_p, top_p is None or 0 < top_p <= 1),
        ("tokens", tokens, tokens >= 1),
        ("samples", len(seeds), len(seeds) >= 1),
        ("seed", max(seeds, key=abs, default=0), all(0 <= seed < 2**63 for seed in seeds)),
    ):
        if not allowed:
            fix = "a finite temperature >= 0, top-k >= 1, 0 < top-p <= 1, tokens >= 1, samples >= 1, 0 <= seed < 2^63"
            raise UserError(f"{name} = {value} is out of range", f"--{name}", fix)
    never, start = encoder.unsampled, encoder.prompt(prompt)
    samples = go_on(model, start, tokens, never, temperature, top_k, top_p, seeds)
    return [encoder.decode(sample[1:]) for sample in samples]


@torch.no_grad()
def go_on(
    model: Transformer, prompt: Sequence[int], tokens: int, never: Sequence[int], temperature: float, top_k: int | None,
    top_p: float | None, seeds: Sequence[int],
) -> list[list[int]]:  # fmt: skip
    """The prompt's ids and `tokens` more, once for each of `seeds`; ids of `never` are not picked."""
    rngs = [torch.Generator().manual_seed(seed) for seed in seeds]
    model.eval()
    reader = Reader(model, torch.tensor(prompt).expand(len(seeds), -1))
    for _ in range(tokens):
        logits = reader.logits()
        if not logits.isfinite().all():
            raise UserError("the model's predictions are not finite", fix="take an earlier one with --checkpoint STEP")
        logits[:, never] = -torch.inf
        picked = [pick(row, temperature, top_k, top_p, rng) for row, rng in zip(logits, rngs, strict=True)]
        reader.append(torch.tensor(picked).unsqueeze(1))
    return reader.ids.tolist()


class Reader:
    """Texts that grow, all of a length, and what the model says comes next; each token is read once for as long as it can be.

    The model sees a window of at most `context` tokens, whose positions are learned from the window's beginning: once it
    is full, nothing can be appended, and to move it by a token would give every token another position. So it begins anew
    with the last half of its tokens, which are read again: a token then sees between half a context and a whole one, and
    costs, but for that one in context / 2, the same wherever it stands.

    ids    (B, T) int64, on the CPU
    """

    def __init__(self, model: Transformer, ids: Tensor):
        self.model, self.ids = model, ids
        self._past = Past(model.config, model.context, len(ids), model.tokens.weight)
        self._unread = ids[:, -model.context :]

    def append(self, ids: Tensor) -> None:
        """One more of each text: ids (B, 1)."""
        self.ids = torch.cat([self.ids, ids], dim=1)
        if self._past.length == self.model.context:
            self._past.length = 0
            ids = self.ids[:, -max(self.model.context // 2, 1) :]
        self._unread = ids

    def logits(self) -> Tensor:
        """Of what comes next: (B, V) fp32, on the CPU."""
        device = self.model.tokens.weight.device
        hidden = self.model.hidden(self._unread.to(device), past=self._past)
        return self.model.logits(hidden[:, -1]).float().cpu()
