"""What the parts of one memory cost, worked out before anything is built. Imports no torch.

Letters as in the paper: H heads, K slots, C sub-keys a side, k selected slots, q query size, d model width; R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from pkm.config.kinds import GATES, KEYS, READS, named
from pkm.config.schema import MemoryConfig

FP32 = 4
INDEX = 4
"""Bytes of a slot's index when it is sent; the reference kernels' indices are twice that."""


@dataclass(frozen=True)
class Cost:
    """Of one part of one memory."""

    parameters: int = 0
    """All but those of tables."""
    row: int = 0
    """Numbers of a slot in tables: there are K times as many."""
    widths: tuple[int, ...] = ()
    """Columns of each of these tables: those that sharding shares out."""
    selections: int = 0
    """How often a token's H k indices and weights are sent to other ranks, where tables are sharded."""
    exchanged: int = 0
    """Numbers of a token that ranks then send each other, R - 1 of R of them."""
    flops: int = 0
    """Forward, of one token. What counts: see pkm.model.cost.Flops."""
    backward_flops: int | None = None
    """If they are not twice those of forward, as products of matrices have it."""
    kept: int = 0
    """Numbers of one token that backward needs, in the dtype of products of matrices."""
    kept_fp32: int = 0
    """The same, of those that stay in fp32, or are indices and as large."""

    @property
    def backward(self) -> int:
        """FLOPs of backward, of one token."""
        return 2 * self.flops if self.backward_flops is None else self.backward_flops


def query(m: MemoryConfig, d: int) -> Cost:
    """Each head's linear maps with biases, d -> hidden -> q, and weight and bias (rms: weight) of a normalisation over the H x q.

    Kept are queries as projected; centred and normalised ones too, but where fast kernels fold the normalisation into keys.
    """
    if m.keys == "ngram":
        return Cost()
    widths = list(pairwise([d, *m.query.hidden, m.query.dim]))
    norm = {"none": 0, "rms": 1, "layer": 2, "layer_halves": 2, "batch": 2}[m.query.norm] * m.query.dim
    features = m.heads * m.query.dim
    apart = m.query.norm in ("layer", "layer_halves", "rms") or (
        m.query.norm == "batch" and (m.kernels in ("reference", "faiss") or m.keys == "tucker")
    )
    return Cost(
        parameters=m.heads * (sum(a * b + b for a, b in widths) + norm),
        flops=2 * m.heads * sum(a * b for a, b in widths),
        kept=features,
        kept_fp32=2 * features if apart else 0,
    )


def product_keys(m: MemoryConfig, d: int) -> Cost:
    """H x 2 x C sub-keys of q / 2: 2 H C q FLOPs for the scores."""
    return _search(m, scores=m.heads * 2 * (m.sub_keys or 0), size=m.query.dim // 2)


def tucker_keys(m: MemoryConfig, d: int) -> Cost:
    """H x 2 x r x C' sub-keys of q_side, P cores of r x r a head.

    FLOPs: scores 2 H 2 r C' q_side; the coarse stage 2 H 2 C' r; the fine one's k^2 pairs 2 H (k r^2 + k^2 r); the selected
    pairs' by each core. Gradients reach scores through the selected alone, but pass the products of matrices whole.
    """
    h, r, k = m.heads, m.rank, m.knn
    side, size = m.sub_keys_searched, m.query.dim // (2 * r if m.queries_by_rank else 2)
    sets = 1 if m.keys_shared_by_heads else h
    scores, selected = 2 * h * 2 * r * side * size, 2 * h * k * m.cores * (r * r + r)
    return Cost(
        parameters=sets * 2 * r * size * (side + (m.keys_norm == "rms")) + h * m.cores * r * r,
        flops=scores + selected + 2 * h * 2 * side * r + 2 * h * (k * r * r + k * k * r),
        backward_flops=2 * (scores + selected),
        kept_fp32=h * (2 * r + m.cores + 3) * k,
    )


def ngram_keys(m: MemoryConfig, d: int) -> Cost:
    """Addresses are computed, not learnt; J indices and weights are kept, 64 and 32 bits each."""
    return Cost(kept_fp32=3 * m.reads)


def flat_keys(m: MemoryConfig, d: int) -> Cost:
    """H x K keys of q: 2 H K q FLOPs for the scores."""
    return _search(m, scores=m.heads * m.size, size=m.query.dim)


def _search(m: MemoryConfig, scores: int, size: int) -> Cost:
    """Gradients reach only the k selected slots of a head: 4 H k q FLOPs, for queries and keys together.

    Kept are H k indices and weights; by the reference kernels, whose indices are twice as large, all scores too. Heads that
    share keys hold them once; normalised keys have a gain of q numbers for each head that has keys of its own.
    """
    selected = m.reads
    reference = m.kernels == "reference"
    sets = 1 if m.keys_shared_by_heads else m.heads
    return Cost(
        parameters=scores * size * sets // m.heads + (sets * m.query.dim if m.keys_norm == "rms" else 0),
        flops=2 * scores * size,
        backward_flops=4 * selected * m.query.dim,
        kept_fp32=2 * selected + (selected + scores if reference else 0),
    )


def rows(m: MemoryConfig, d: int) -> Cost:
    """A row of d numbers a slot; H k of them summed."""
    width, given = m.value_width(d), m.given_width(d)
    several = m.expansion * m.cores  # what each of these reads is a read of its own
    return Cost(row=width, widths=(width // m.cores,), selections=several, exchanged=given, flops=2 * m.reads * width)


def experts(m: MemoryConfig, d: int) -> Cost:
    """A row that is multiplied with the token, of d numbers, and a value, H k of each. Kept are the products, and the weights that
    they make."""
    return _experts(m, d, m.value_width(d))


def linear_experts(m: MemoryConfig, d: int) -> Cost:
    """As of experts, whose input is projected first."""
    width = m.input_width(d)
    of_rows = _experts(m, width, m.value_width(d))
    return replace(of_rows, parameters=d * width, flops=of_rows.flops + 2 * d * width, kept=width)


def _experts(m: MemoryConfig, inputs: int, outputs: int) -> Cost:
    reads, both = m.reads, inputs + outputs
    return Cost(
        row=both, widths=(inputs, outputs), selections=2, exchanged=both, flops=2 * reads * both, kept_fp32=2 * reads
    )


def as_it_is(m: MemoryConfig, d: int) -> Cost:
    """What was read is what joins the residual stream; a map without bias where its width is not the model's, and of n-grams one
    number that it is multiplied with."""
    if m.keys == "ngram":
        return Cost(parameters=1, flops=d)
    if not m.is_projected:
        return Cost()
    width = m.given_width(d)
    return Cost(parameters=width * d, flops=2 * width * d, kept=width)


def silu_gate(m: MemoryConfig, d: int) -> Cost:
    """Maps d -> dv -> d with biases; kept are what is read, the gate before and after its activation, and their product."""
    width = m.given_width(d)
    return Cost(parameters=2 * d * width + d + width, flops=4 * d * width, kept=4 * width)


def context_gate(m: MemoryConfig, d: int) -> Cost:
    """Maps dv -> d of key and value, weights of two norms; kept are what was read, key and value, and both normalised.

    A convolution has d numbers for each token that it spans, and a norm; kept are its input, normalised too, and the sum.
    """
    width, spans = m.given_width(d), m.convolution or 0
    convolved = d if spans else 0
    return Cost(
        parameters=2 * d * width + 2 * d + spans * d + convolved,
        flops=4 * d * width + 2 * d + 2 * spans * d,
        kept=width + 2 * d + 2 * convolved,
        kept_fp32=2 * d + convolved,
    )


def keys(m: MemoryConfig, d: int) -> Cost:
    """Of the keys that `memory.keys` names."""
    cost: Cost = named(KEYS[m.keys].cost)(m, d)
    return cost


def read(m: MemoryConfig, d: int) -> Cost:
    """Of the read that `memory.read` names."""
    cost: Cost = named(READS[m.read].cost)(m, d)
    return cost


def output(m: MemoryConfig, d: int) -> Cost:
    """Of what `memory.gate` names."""
    cost: Cost = named(GATES[m.gate].cost)(m, d)
    return cost


def parts(m: MemoryConfig, d: int) -> list[Cost]:
    """Everything of one memory."""
    return [query(m, d), keys(m, d), read(m, d), output(m, d)]


def row(m: MemoryConfig, d: int) -> int:
    """Numbers of a slot in all of the memory's tables."""
    return sum(part.row for part in parts(m, d))


def kept_bytes(m: MemoryConfig, d: int, product: int) -> int:
    """Bytes of one token that backward needs; `product` is a number's as products of matrices give it."""
    again = d * product if m.skip else 0  # its input, normalised apart from the feed-forward network's
    return again + sum(part.kept * product + part.kept_fp32 * FP32 for part in parts(m, d))


def table_rows(m: MemoryConfig, memories: int) -> int:
    """Slots of all tables of a section of so many memories."""
    if m.keys == "ngram":
        from pkm.memory.hashing import rows  # late: it takes NumPy

        return rows(m, memories)
    return m.size * (1 if m.share_values else memories)


def touched_rows(m: MemoryConfig, tokens: int) -> int:
    """Slots that `tokens` tokens read at most."""
    return min(m.size, tokens * m.reads)


def summed(size: int, ranks: int) -> int:
    """Bytes that each rank sends for a sum of `size` bytes over all, as a ring."""
    return 2 * size * (ranks - 1) // ranks


def statistics(m: MemoryConfig) -> int:
    """Bytes of mean and variance of the H q query features, if the query's normalisation takes them over tokens."""
    return 2 * m.heads * m.query.dim * FP32 if m.query.norm == "batch" and m.keys != "ngram" else 0


def sent_replicated(m: MemoryConfig, d: int, tokens: int, ranks: int, dense: bool) -> int:
    """Bytes that each rank sends in an update of a table that all hold, with `tokens` of each; `dense`: its gradient is whole.

    Else K bytes say which rows were read, and their gradients are summed: most where no two ranks read the same row.
    """
    size = row(m, d) * FP32
    if dense:
        return summed(m.size * size, ranks)
    return summed(m.size, ranks) + summed(touched_rows(m, ranks * tokens) * size, ranks)


def sent_sharded(m: MemoryConfig, d: int, tokens: int, ranks: int, product: int, forwards: int) -> int:
    """Bytes that each rank sends in an update of tables of which each holds columns, with `tokens` of each in it.

    Of each table N J indices and weights to each other rank, and the weights' gradients back; N d / R outputs to each other
    rank, and their gradients back; of experts' first table tokens go and products come back, as many. `forwards`: 2 if
    activations are recomputed.
    """
    reads = m.reads * sum(part.selections for part in parts(m, d))
    selection = (ranks - 1) * tokens * reads * (forwards * (INDEX + FP32) + FP32)
    outputs = (ranks - 1) * tokens * sum(part.exchanged for part in parts(m, d)) // ranks * product * (forwards + 1)
    return selection + outputs
