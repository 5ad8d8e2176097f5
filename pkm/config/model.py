"""The section `model`."""

from __future__ import annotations

from typing import Literal

from pkm.config.part import Part, Positive, Probability, Rate, Weight


class RotaryConfig(Part):
    """Rotary positions."""

    base: Rate = 10_000.0
    """The slowest pair turns by one over nearly so much a token, in radians; larger for longer contexts."""
    pairs: Literal["halves", "neighbours"] = "halves"
    """Which numbers of a head make a pair: 0 with size / 2 (Llama in transformers, Qwen, GPT-NeoX), or 0 with 1 (GPT-J)."""


class ExpertsConfig(Part):
    """A mixture of experts in place of feed-forward networks."""

    count: Positive
    """Experts of a block, E."""
    active: Positive = 2
    """Experts that a token is sent to."""
    at: tuple[Positive, ...] | None = None
    """Blocks whose feed-forward network they replace, counted from 1; null = all that have one."""
    ffn: Positive | None = None
    """Hidden width of an expert; null = the dense network's over `active`: as much work."""
    balance: Weight = 0.01
    """Weight of the loss that evens out the experts' load (Fedus et al., 2021)."""


class ModelConfig(Part):
    """The transformer. Its defaults are the paper's (docs/model.md says what is usual today)."""

    layers: Positive = 12
    """Transformer blocks, L."""
    dim: Positive = 1024
    """Width of the residual stream, d."""
    heads: Positive = 16
    """Attention heads; must divide dim."""
    kv_heads: Positive | None = None
    """Heads of keys and values, each for as many query heads (grouped-query attention); null = heads."""
    qk_norm: bool = False
    """A norm over each head's query and key, before they are turned."""
    window: Positive | None = None
    """Tokens that a token attends to at most, itself included (sliding window); null = all before it."""
    document_mask: bool = False
    """Attention stops where a document ends, and positions begin anew."""
    ffn: Positive | None = None
    """Hidden width of the feed-forward network; null = 4 * dim, for swiglu 8/3 * dim: as many parameters."""
    activation: Literal["gelu", "relu", "relu2", "swiglu"] = "gelu"
    """Of the feed-forward network; relu2 = relu squared."""
    experts: ExpertsConfig | None = None
    """Absent = dense feed-forward networks."""
    positions: Literal["learned", "rotary", "none"] = "learned"
    """Position embeddings, or queries and keys turned by their positions."""
    rotary: RotaryConfig = RotaryConfig()
    norm: Literal["post", "pre"] = "post"
    """A norm after each residual sum, as in the paper's code, or before each sublayer."""
    norm_type: Literal["layer", "rms"] = "layer"
    """LayerNorm or RMSNorm, of all but the memories'."""
    norm_eps: Rate = 1e-12
    """Added to the variance before its root; XLM's, others' is 1e-5 or 1e-6."""
    embedding_norm: bool = True
    """A norm over the sum of the embeddings, as in the paper's code."""
    bias: bool = True
    """Biases of linear maps, LayerNorms and the output; the memories keep theirs."""
    tie_embeddings: bool = True
    """The output layer's weight is that of the token embeddings."""
    logit_cap: Rate | None = None
    """Soft cap c of the output's logits: c * tanh(logit / c); null = none."""
    dropout: Probability = 0.0
    """After embeddings, attention and feed-forward network, and on the attention weights."""
