"""What a model writes at each evaluation, to be looked at: it goes on from the beginning of the validation text."""

from __future__ import annotations

import numpy as np
import torch

from pkm.config.schema import Config
from pkm.corpus.store import Corpus
from pkm.device import Compute
from pkm.errors import UserError
from pkm.evaluation.evaluate import inference
from pkm.inference.generate import go_on
from pkm.model.transformer import Transformer
from pkm.text.vocab import Vocab

PROMPT = 16
"""Tokens of the validation text that are given, at most."""
TOP_P = 0.9


class Sampler:
    """The same prompt and the same seed every time, so that samples of a run, and of two runs, compare."""

    def __init__(self, config: Config, corpus: Corpus):
        """Samples of `evaluate.sample` tokens; none without validation text, nor of ids that cannot be read."""
        self.tokens, self.seed = config.evaluate.sample if corpus.valid and corpus.decodes else 0, config.seed
        if corpus.valid and self.tokens:
            self.encoder = corpus.encoder()
            given = corpus.valid.read(0, min(PROMPT, config.corpus.context // 2))
            if isinstance(corpus.vocab, Vocab):  # no word is cut
                ends = np.flatnonzero(corpus.vocab.word_ends[given] | (given == self.encoder.end_id))
                given = given[: max(ends, default=-1) + 1]
            self.prompt = [self.encoder.end_id, *given.tolist()]

    def write(self, model: Transformer, compute: Compute) -> dict[str, str] | None:
        """{prompt, text}; None without one, also where the model's predictions are not finite. Every rank must call it."""
        if not self.tokens:
            return None
        # Compiled blocks would be compiled anew for every length.
        with inference(model), compute.autocast(), torch.compiler.set_stance("force_eager"):
            try:
                never = self.encoder.unsampled
                (ids,) = go_on(model, self.prompt, self.tokens, never, 1.0, None, TOP_P, (self.seed,))
            except UserError:
                return None
        prompt, whole = self.encoder.decode(self.prompt[1:]), self.encoder.decode(ids[1:])
        text = whole.removeprefix(prompt) if whole.startswith(prompt) else self.encoder.decode(ids[len(self.prompt) :])
        return {"prompt": prompt, "text": text}
