"""A language model with product-key memories (Lample et al., 2019) or their kin, for transformers.

This file and those that it imports need it and torch alone:

    AutoModelForCausalLM.from_pretrained(DIRECTORY, trust_remote_code=True)

Names of weights are those of the training framework that wrote the directory (pkm). In training the experts' load is
not evened out, and the whole table of a memory gets a gradient: fine for adapters and short runs, else train with pkm.

Shapes: B texts, T tokens, S tokens seen in all, d width, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from pkm.inference.hugging_face.blocks_pkm import Block, build_norm
from pkm.inference.hugging_face.keys_pkm import BatchNorm, HeadsLayerNorm, HeadsRMSNorm
from pkm.inference.hugging_face.memories_pkm import Memory, Places, ShortConvolution, kept

NOTHING = 2
"""The id that stands before a text for n-grams, and for padding: pkm's <pad>."""
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class PkmConfig(PretrainedConfig):
    """What config.json says.

    block       the blocks, by the names of pkm's `model:` section
    memories    {block from "1": {name of the module: settings of pkm's `memory:` section, "section": which of them it is, and
                of n-grams "rows" of each hash}}; with share_values a section's memories read the tables of its first
    experts     {block from "1": {"count", "active", "ffn"}}
    """

    model_type = "pkm"

    def __init__(
        self,
        vocab_size: int = 0,
        hidden_size: int = 0,
        intermediate_size: int = 0,
        num_hidden_layers: int = 0,
        num_attention_heads: int = 1,
        num_key_value_heads: int = 1,
        max_position_embeddings: int = 0,
        block: dict[str, Any] | None = None,
        memories: dict[str, dict[str, dict[str, Any]]] | None = None,
        experts: dict[str, dict[str, int]] | None = None,
        **kwargs: Any,
    ):
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.block, self.memories, self.experts = block or {}, memories or {}, experts or {}
        super().__init__(**kwargs)


class PkmPreTrainedModel(PreTrainedModel):
    config_class = PkmConfig
    base_model_prefix = ""
    _no_split_modules = ["Block"]
    _supports_sdpa = True
    supports_gradient_checkpointing = True

    def _init_weights(self, module: nn.Module) -> None:
        """Of a model that is made from a config alone: matrices and tables N(0, 1 / inputs), norms 1 and 0, keys of norm 1, convolutions 0."""
        for name, p in module.named_parameters(recurse=False):
            if name == "gain":
                nn.init.constant_(p, module.get_parameter("weight").shape[-1] ** -0.5)
            elif name == "scale":
                nn.init.constant_(p, 0.1)
            elif name == "cores":
                nn.init.uniform_(p)
            elif isinstance(module, ShortConvolution):
                nn.init.zeros_(p)
            elif (
                isinstance(module, nn.LayerNorm | nn.RMSNorm | BatchNorm | HeadsLayerNorm | HeadsRMSNorm) or p.ndim < 2
            ):
                nn.init.constant_(p, 1.0 if name == "weight" else 0.0)
            else:
                nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        if isinstance(module, BatchNorm):
            nn.init.zeros_(module.running_mean)  # type: ignore[arg-type]
            nn.init.ones_(module.running_var)  # type: ignore[arg-type]


class PkmForCausalLM(PkmPreTrainedModel, GenerationMixin):
    """ids -> logits of the next ids. The weights of the token embeddings are the output's too, or there are two of them.

    canonical    (V,), where there are n-gram memories: ids that read alike have one number
    """

    canonical: Tensor

    def __init__(self, config: PkmConfig):
        super().__init__(config)
        block, dim = config.block, config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, dim)
        learned = block["positions"] == "learned"
        self.positions = nn.Embedding(config.max_position_embeddings, dim) if learned else None
        self.embedding_norm = build_norm(config, dim) if block["embedding_norm"] else nn.Identity()
        first: dict[int, Memory] = {}
        blocks = nn.ModuleList(Block(config, layer, first) for layer in range(config.num_hidden_layers))
        self.blocks = cast(Sequence[Block], blocks)  # a ModuleList does not say of what
        self.final_norm = build_norm(config, dim) if block["norm"] == "pre" else nn.Identity()
        self.output = None if config.tie_word_embeddings else nn.Linear(dim, config.vocab_size, bias=False)
        self.output_bias = nn.Parameter(torch.zeros(config.vocab_size)) if block["bias"] else None
        orders = [n for here in config.memories.values() for m in here.values() if "rows" in m for n in m["orders"]]
        self.longest = max(orders, default=0)
        if self.longest:
            self.register_buffer("canonical", torch.arange(config.vocab_size))
        # In the cache a layer of ids, and one of each convolution, are after those of the blocks.
        convolutions = (module for module in self.modules() if isinstance(module, ShortConvolution))
        for layer, convolution in enumerate(convolutions, start=len(self.blocks) + 1):
            convolution.layer = layer
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.tokens = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module | None:
        """None where they are the input's, one parameter."""
        return self.output

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.output = value  # type: ignore[assignment]

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """The bias of new ids is 0, and to n-grams each is a number of its own."""
        before = self.config.vocab_size
        found = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        more = self.config.vocab_size - before
        if self.output_bias is not None:
            self.output_bias = nn.Parameter(F.pad(self.output_bias.detach(), (0, more)))
        if self.longest:
            own = torch.arange(self.config.vocab_size, device=self.canonical.device)
            self.canonical = torch.cat([self.canonical[:before], own[before:]])[: len(own)]
        return found

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None, **kwargs: Any) -> Tensor | None:
        """With a cache of a fixed size transformers would make a mask (B, 1, T, S), from which padding is not known."""
        return attention_mask

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """input_ids (B, T); attention_mask (B, S) with 0 for padding; labels (B, T), not shifted, -100 = not counted.

        past_key_values    what `cache` is called in releases of transformers that have no `cache`
        """
        cache = past_key_values if cache is None else cache
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        first = 0 if cache is None else int(cache.get_seq_length())
        own = first + torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        real = None
        if attention_mask is not None and not attention_mask.all():
            attention_mask = attention_mask[:, : first + x.shape[1]].bool()
            real = attention_mask[:, first:]
        else:
            attention_mask = None
        if position_ids is None:
            position_ids = own
            if attention_mask is not None:
                position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, first:]
        back = self._looking_back(input_ids, real, cache) if self.longest else None
        x = self._with_positions(x, position_ids)
        visible = self._visible(own, attention_mask)
        places = Places(self._angles(position_ids), visible, real, back, cache)
        x = F.dropout(self.embedding_norm(x), self.config.block["dropout"], self.training)
        states = [x]
        waiting: dict[int, list[Tensor]] = {}  # by the block after which they join
        for layer, block in enumerate(self.blocks):
            x, late = block(x, places)
            if late is not None:
                waiting.setdefault(layer + block.skip, []).append(late)
            x = sum(waiting.pop(layer, []), x)
            states.append(x)
        states[-1] = x = self.final_norm(x)
        logits = self._logits(x[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else x[:, logits_to_keep])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        found = CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=tuple(states) if output_hidden_states else None,
            **{CACHE: cache if use_cache is not False else None},
        )  # fmt: skip
        return found if return_dict is not False else found.to_tuple()

    def _with_positions(self, x: Tensor, position_ids: Tensor) -> Tensor:
        if self.positions is None:
            return x
        longest = self.config.max_position_embeddings
        if int(position_ids.max()) >= longest:
            raise ValueError(f"the model has learned positions of {longest} tokens: give it no more at once")
        return x + self.positions(position_ids)

    def _looking_back(self, input_ids: Tensor | None, real: Tensor | None, cache: Any) -> Tensor:
        """What n-grams are looked up by, (B, T, longest order): of each token its own canonical id and those before it."""
        if input_ids is None:
            raise ValueError("the model looks up n-grams of ids: give it input_ids, not inputs_embeds alone")
        nothing, seen = self.canonical[NOTHING], self.canonical[input_ids]
        if real is not None:
            seen = seen.masked_fill(~real, nothing)
        seen = kept(cache, len(self.blocks), seen.unsqueeze(-1)).squeeze(-1)
        before = nothing.expand(len(seen), self.longest - 1)
        seen = torch.cat([before, seen], 1)[:, -(input_ids.shape[1] + self.longest - 1) :]
        return seen.unfold(1, self.longest, 1).flip(-1)

    def _angles(self, position_ids: Tensor) -> Tensor | None:
        if self.config.block["positions"] != "rotary":
            return None
        half = self.config.hidden_size // self.config.num_attention_heads // 2
        turns = torch.arange(half, device=position_ids.device).float() / half
        frequencies = self.config.block["rotary"]["base"] ** -turns
        return (position_ids.unsqueeze(-1) * frequencies).unsqueeze(1)

    def _visible(self, own: Tensor, attention_mask: Tensor | None) -> Callable[[int], Tensor]:
        """own (1, T): which of the tokens seen each is; attention_mask (B, S) bool or None."""
        made: dict[int, Tensor] = {}

        def visible(seen: int) -> Tensor:
            if seen not in made:
                every = torch.arange(seen, device=own.device)
                mask = every <= own.unsqueeze(-1)
                if self.config.block["window"]:
                    mask = mask & (every > own.unsqueeze(-1) - self.config.block["window"])
                if attention_mask is not None:
                    real = F.pad(attention_mask, (0, seen - attention_mask.shape[1]))
                    # Padding sees itself: a row of nothing has no softmax.
                    mask = (mask & real.unsqueeze(1)) | (every == own.unsqueeze(-1))
                made[seen] = mask.unsqueeze(1)
            return made[seen]

        return visible

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.tokens.weight) if self.output is None else self.output(hidden)
        if self.output_bias is not None:
            logits = logits + self.output_bias
        cap = self.config.block["logit_cap"]
        return logits if cap is None else cap * torch.tanh(logits / cap)
