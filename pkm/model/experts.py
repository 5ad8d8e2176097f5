"""A mixture of experts in place of a feed-forward network: the baseline that memories are measured against.

Shapes: N tokens, d model width, E experts of hidden width f, of which a token's router chooses k.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pkm.config.schema import Config


class Experts(nn.Module):
    """y = sum over the k most probable experts i of p_i FFN_i(x), p = softmax of the router (Shazeer et al., 2017).

    With k > 1 the chosen p are made to sum to 1; with k = 1 p stays as it is, for else the router would not learn (Fedus et
    al., 2021). No token is dropped, however many choose the same expert. Experts have no biases.

    balance    in training the loss that evens out the load, E sum_i f_i P_i (Fedus et al., eq. 4), times `config.balance` and
               N: f is the share of choices that fell on expert i, over all ranks, P the mean of its p over the N tokens
               of this micro-batch and rank. It is 1 a token for an even load. None at evaluation
    record     if True, `selection` holds what the last forward chose, as a memory's does with one head: experts (N, 1, k),
               their p (N, 1, k), and which tokens are not padding
    sum_over_ranks  set where there are several (pkm.train.parallel)
    """

    balance: Tensor | None
    selection: tuple[Tensor, Tensor, Tensor | None]

    def __init__(self, config: Config, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        assert config.model.experts is not None
        experts, dim, hidden = config.model.experts, config.model.dim, config.expert_ffn
        self.count, self.active, self.coefficient = experts.count, experts.active, experts.balance
        self.activation, self.record, self.balance = activation, False, None
        self.sum_over_ranks: Callable[[Tensor], Tensor] | None = None
        self.router = nn.Linear(dim, experts.count, bias=False)
        self.expand = _matrices(experts.count, hidden, dim)
        self.contract = _matrices(experts.count, dim, hidden)
        self.gate = _matrices(experts.count, hidden, dim) if config.model.activation == "swiglu" else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, T, d), mask (B, T) bool with True for real tokens, None if all are -> (B, T, d)."""
        tokens = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):  # which expert is the best must not hang on rounding
            p = F.linear(tokens.to(self.router.weight.dtype), self.router.weight).softmax(-1)
        weights, chosen = p.topk(self.active, dim=-1)
        if self.active > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.record:
            self.selection = (
                chosen.unsqueeze(1),
                weights.detach().unsqueeze(1),
                None if mask is None else mask.flatten(),
            )
        # Choices in the experts' order, each expert's tokens together.
        expert, order = chosen.flatten().sort(stable=True)
        loads = torch.bincount(expert, minlength=self.count)
        self.balance = None
        if self.training:
            everywhere = loads.float() if self.sum_over_ranks is None else self.sum_over_ranks(loads.float())
            shares = everywhere / everywhere.sum()
            self.balance = self.coefficient * self.count * len(tokens) * (shares * p.mean(0)).sum()
        y = self._apply_experts(tokens[order // self.active], loads)[order.argsort()]
        y = y.view(len(tokens), self.active, -1)
        return (y * weights.unsqueeze(-1).to(y.dtype)).sum(1).view(x.shape)

    def _apply_experts(self, rows: Tensor, loads: Tensor) -> Tensor:
        """rows (N k, d), sorted by expert, and how many each has, (E,) -> (N k, d)."""
        expanded = _products(rows, self.expand, loads)
        if self.gate is not None:
            return _products(self.activation(_products(rows, self.gate, loads)) * expanded, self.contract, loads)
        return _products(self.activation(expanded), self.contract, loads)


def _matrices(count: int, outputs: int, inputs: int) -> nn.Parameter:
    """(count, outputs, inputs), each begun as torch's Linear begins its."""
    return nn.Parameter(torch.empty(count, outputs, inputs).uniform_(-(inputs**-0.5), inputs**-0.5))


def _products(rows: Tensor, weights: Tensor, loads: Tensor) -> Tensor:
    """Rows (n, inputs), as many as `loads` (E,) says for each matrix of weights (E, outputs, inputs) -> (n, outputs).

    In autocast's dtype. On a GPU and in bf16 one grouped product; else a product for each.
    """
    device = rows.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
    rows, weights = rows.to(dtype), weights.to(dtype)
    if grouped(rows, weights):
        offsets = loads.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=offsets)
    return _one_by_one(rows, weights, loads)


@torch.compiler.disable  # sizes that differ in every step would be compiled anew in every step
def _one_by_one(rows: Tensor, weights: Tensor, loads: Tensor) -> Tensor:
    parts = rows.split(loads.tolist())
    return torch.cat([_product(part, matrix) for part, matrix in zip(parts, weights.unbind(), strict=True)])


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    """`F.linear`; of bf16 with rows of zeros at the end, for oneDNN takes a millisecond for each number of rows that is new to it."""
    if rows.dtype is not torch.bfloat16:
        return F.linear(rows, matrix)
    more = one_of_few(len(rows)) - len(rows)
    return F.linear(F.pad(rows, (0, 0, 0, more)), matrix)[: len(rows)]


def one_of_few(rows: int) -> int:
    """The next of 0, 16, 32, ... 256, 288, ... 512, 576, ...: an AMX tile's 16 rows or a sixteenth of a power of two more each time."""
    step = max(16, (1 << (rows - 1).bit_length()) // 16)
    return -(-rows // step) * step


def grouped(rows: Tensor, weights: Tensor) -> bool:
    """Whether torch has a grouped product for these: bf16, on a GPU of compute capability 8 or later, rows of 16 bytes."""
    fits = rows.dtype is torch.bfloat16 and all(size % 8 == 0 for size in weights.shape[1:])
    return fits and rows.is_cuda and hasattr(F, "grouped_mm") and torch.cuda.get_device_capability(rows.device)[0] >= 8
