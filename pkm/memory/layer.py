"""The product-key memory layer: query network -> key search -> weighted read of values (paper 3.1).

Shapes: B windows, T tokens, N = B * T, d model width, H heads, k slots a head reads, K slots, q query size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from pkm.config.schema import MemoryConfig
from pkm.errors import UserError
from pkm.memory.kernels import backend
from pkm.memory.kernels.backend import Backend
from pkm.memory.keys import build_keys
from pkm.memory.ngram import Back, ShortConvolution
from pkm.memory.output import build_output
from pkm.memory.query import QueryNetwork, compute_dtype
from pkm.memory.read import Read, build_read
from pkm.memory.values import Values, borrow


class MemoryLayer(nn.Module):
    """m(x) = sum over heads of sum over the k selected slots i of w_i v_i, w = softmax of their scores (paper eq. 1-3).

    Three choices make a memory: its address (`query` and `keys`: which slots a token reads, with which weights), its `read`
    (what they give) and its `output` (what becomes of that), which of n-grams a `convolution` over neighbouring tokens may follow.

    Under autocast the query network and products with keys run in its dtype; scores, softmax and statistics stay in fp32.

    backend    who computes where the weights are now; None where what the config wants cannot run
    record     if True, `selection` holds what the last forward selected: indices (N, H, k) and weights (N, H, k) of all
               tokens, and which of them are not padding, (N,) bool, or None where no mask was given; and `squares` the
               mean squares of the last output and of the residual stream that it was added to; and, where keys are not
               searched exactly, `recall`: the share of the best slots that were found
    """

    selection: tuple[Tensor, Tensor, Tensor | None]
    squares: tuple[Tensor, Tensor]
    backend: Backend | None
    values: Values
    recall: Tensor | None = None

    def __init__(self, config: MemoryConfig, dim: int, like: MemoryLayer | None = None, index: int = 0, layer: int = 1):
        """like    a memory of the same settings whose tables this one reads too: they stay its parts
        index, layer    which of its section's memories it is, from 0, and where it stands, from 1
        """
        super().__init__()
        backend.check(config.kernels)
        hashed = config.keys == "ngram"
        self.heads, self.knn = (config.reads, 1) if hashed else (config.heads, config.knn)
        self.wanted_kernels = config.kernels
        self.query = None if hashed else QueryNetwork(config.query, dim, config.heads)
        self.keys = build_keys(config, index, layer)
        if like is None:
            # Of several cores each weighs columns of its own: they are rows of their own.
            cores = config.cores if config.read == "rows" else 1
            rows = self.keys.slots if hashed else config.size * cores
            std = 0.0 if hashed and config.gate == "none" and config.values_std is None else config.values_std
            self.values = Values(rows, config.value_width(dim) // cores, std)
        else:
            borrow(self, "values", like.values)
        self.read: Read = build_read(config, dim, None if like is None else like.read)
        self.output = build_output(config, dim)
        spans = config.convolution
        self.convolution = None if spans is None else ShortConvolution(dim, spans, max(config.orders))
        self.record = False
        self._choose_backend()

    @property
    def slots(self) -> int:
        return self.keys.slots

    def begin(self, config: MemoryConfig, dim: int, layers: int, ffn: int) -> None:
        """Of kinds whose first weights depend on the model around them: its layers, and its feed-forward networks' width."""
        begin = getattr(self.keys, "begin", None)
        if begin is not None:
            gains = None if self.query is None or self.query.norm is None else self.query.norm.weight
            own = [m.weight for m in self.modules() if isinstance(m, Values)]
            begin(gains, own, config, dim, layers, ffn)

    def addressing(self) -> Iterator[nn.Parameter]:
        """The parameters that decide which slots are read."""
        return chain(*(part.parameters() for part in (self.query, self.keys) if isinstance(part, nn.Module)))

    def loss(self) -> Tensor | None:
        """What its keys add to the loss of each token that is learned from, (); None if nothing."""
        of_keys = getattr(self.keys, "loss", None)
        return None if of_keys is None else of_keys()

    def output_share(self) -> float:
        """rms of the last recorded output over rms of the residual stream that it was added to."""
        output, residual = self.squares
        return float((output / residual).sqrt())

    def forward(self, x: Tensor, mask: Tensor | None = None, back: Back | None = None) -> Tensor:
        """x (B, T, d), mask (B, T) bool with True for real tokens, None if all are -> (B, T, d); 0 for padding, which reads nothing.

        back    of n-grams: what stands before the tokens

        UserError if the kernels that the config wants cannot run where the weights are.
        """
        if self.backend is None:
            self._choose()
        tokens = x.reshape(-1, x.shape[-1])
        real = None if mask is None else mask.flatten()
        # n-grams ask with ids.
        query: Any = self.query(tokens, real) if self.query is not None else back.ids.flatten(0, 1)  # type: ignore[union-attr]
        indices, weights = self.keys.select(query, self.knn)
        if self.record:
            # Padding too: compiled code cannot have a size that depends on how many tokens are padding.
            self.selection = indices, weights.detach() if weights.ndim == 3 else weights.detach().sum(-1), real
            measure = getattr(self.keys, "recall", None)
            self.recall = None if measure is None else measure(query, indices)
        if real is not None:
            padding = ~real.view(-1, 1, 1)
            indices = indices.masked_fill(padding, -1)
            weights = weights.masked_fill(padding.view(-1, *[1] * (weights.ndim - 1)), 0)  # also where they are NaN
        given = self.read(self.values, tokens, indices.flatten(1), weights.flatten(1, 2), compute_dtype(x))
        out = self.output(given, tokens)
        if self.convolution is not None and back is not None:
            out = self.convolution(out.view(x.shape), back).flatten(0, 1)
        if real is not None:
            out = out.masked_fill(~real.unsqueeze(1), 0)  # of a bias too
        return out.view(x.shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MemoryLayer:
        """What `.to`, `.cuda`, `.double` and their like do: weights that are elsewhere now may want another backend."""
        super()._apply(fn, recurse)
        self._choose_backend()
        return self

    def _choose_backend(self) -> None:
        try:
            self.backend = self._choose()
        except UserError:  # it may yet be moved; if not, `forward` says it
            self.backend = None
        else:
            backend.give(self, self.backend)

    def _choose(self) -> Backend:
        weight = next(self.parameters())
        return backend.choose(self.wanted_kernels, weight.device, weight.dtype)
