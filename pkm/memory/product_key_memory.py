"""A product-key memory for a model of your own: a module with keyword arguments in place of a run's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from pkm.config.rules import impossible
from pkm.config.schema import Config, MemoryConfig
from pkm.errors import UserError, UserErrors
from pkm.memory.layer import MemoryLayer


class ProductKeyMemory(MemoryLayer):
    """x (..., dim) -> (..., dim), in place of a feed-forward network, beside it or after it (Lample et al., 2019).

        memory = ProductKeyMemory(dim=1024, sub_keys=512, heads=4, knn=32)      # 512^2 slots
        y = memory(x)                                                           # or memory(x, mask), True = no padding

    Arguments but `dim`, the width of x, are the settings of a run's `memory:` section, by the same names and with the same
    defaults (configs/base.yaml); `query` takes any of dim, hidden and norm. UserError, with every mistake in it, for what
    they cannot be.

    Train it with `pkm.optimizers`, which moves only the rows that were read. With any other optimizer it is a module like
    any other: its table `values.weight` (slots, dim) gets a gradient of its whole size.

    With `query: {norm: batch}`, the default, it is as `nn.BatchNorm1d` is: statistics over all tokens of the batch in
    training, of each process for itself, and the running ones in `.eval()`.
    """

    def __init__(
        self,
        dim: int,
        *,
        sub_keys: int | None = None,
        heads: int = 4,
        knn: int = 32,
        query: Mapping[str, Any] | None = None,
        keys: str = "product",
        slots: int | None = None,
        keys_norm: str = "none",
        keys_shared_by_heads: bool = False,
        read: str = "rows",
        activation: str = "gelu",
        values_dim: int | None = None,
        gate: str = "none",
        values_std: float | None = None,
        kernels: str = "auto",
    ):
        settings = dict(sub_keys=sub_keys, heads=heads, knn=knn, query=query or {}, keys=keys, slots=slots)
        settings |= dict(keys_norm=keys_norm, keys_shared_by_heads=keys_shared_by_heads, read=read, gate=gate)
        settings |= dict(activation=activation, values_dim=values_dim)
        super().__init__(checked(settings | dict(values_std=values_std, kernels=kernels)), dim)


def checked(settings: Mapping[str, Any]) -> MemoryConfig:
    """The settings as a `memory:` section; UserErrors with every mistake in them."""
    errors: Sequence[UserError]
    try:
        config = MemoryConfig.model_validate({"layers": (1,), **settings})
    except ValidationError as error:
        problems = error.errors(include_url=False)
        errors = [UserError(p["msg"], ".".join(map(str, p["loc"]))) for p in problems]
    else:
        # All the rules of a run's config that read nothing but its memory.
        found = impossible(Config.model_construct({"memory"}, memory=config))
        errors = [UserError(what, key.removeprefix("memory."), fix.replace("memory.", "")) for key, what, fix in found]
        if config.keys not in ("product", "flat"):
            what = f"{config.keys} keys depend on the model around them: on its layers, or on ids of tokens"
            errors = [*errors, UserError(what, "keys", "choose product or flat, or train with a config")]
    if errors:
        raise UserErrors("ProductKeyMemory cannot be made of these settings", list(errors))
    return config
