"""A product-key memory for a model of your own: a module with keyword arguments in place of a run's config."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import yaml

from pkm.checkpoint import tensor_file
from pkm.config.arguments import check_arguments
from pkm.config.rules import impossible
from pkm.config.schema import Config, MemoryConfig
from pkm.errors import UserError, UserErrors
from pkm.files import atomic_write, explained, publish
from pkm.memory.layer import MemoryLayer

SETTINGS, WEIGHTS = "memory.yaml", "memory.safetensors"


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
        config = checked(dim, settings | dict(values_std=values_std, kernels=kernels))
        super().__init__(config, int(dim))
        own = inspect.signature(ProductKeyMemory).parameters
        self.settings = {"dim": int(dim), **{k: v for k, v in config.model_dump(mode="json").items() if k in own}}

    def save(self, directory: Path | str) -> None:
        """Write the memory into a directory of its own, whole; UserError if there is something, or it cannot be written."""
        directory = Path(directory)
        temporary = directory.with_name(f".{directory.name}.tmp")
        try:
            with explained(directory):
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                tensor_file.write(temporary / WEIGHTS, dict(self.state_dict()))
                atomic_write(temporary / SETTINGS, yaml.safe_dump(self.settings, sort_keys=False))
            publish(temporary, directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @classmethod
    def load(cls, directory: Path | str) -> ProductKeyMemory:
        """The memory that `save`, or scripts/import.py, wrote. UserError if it is not there or damaged."""
        directory = Path(directory)
        try:
            with explained(directory / SETTINGS):
                settings = yaml.safe_load((directory / SETTINGS).read_text("utf-8"))
            memory = cls(**settings)
            with explained(directory / WEIGHTS):
                (directory / WEIGHTS).stat()  # says what is wrong with the file better than safetensors does
            with tensor_file.opened(directory / WEIGHTS) as file:
                memory.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (yaml.YAMLError, TypeError, ValueError, RuntimeError) as error:
            what = f"it is no memory that was saved: {str(error).splitlines()[0]}"
            raise UserError(what, str(directory), "save it again") from None
        return memory


def checked(dim: int, settings: Mapping[str, Any]) -> MemoryConfig:
    """The settings as a `memory:` section; UserErrors with every mistake in them, that of `dim` too."""
    found = check_arguments({"layers": (1,), **settings}, MemoryConfig)
    errors = [error for _, error in found.errors]
    if not isinstance(dim, Integral) or dim < 1:
        errors.insert(0, UserError(f"dim must be a whole number > 0; found {dim!r}"))
    config: MemoryConfig = found.config
    if config is not None:
        # All the rules of a run's config that read nothing but its memory.
        wrong = impossible(Config.model_construct({"memory"}, memory=config))
        errors += [UserError(what, key.removeprefix("memory."), fix.replace("memory.", "")) for key, what, fix in wrong]
        if config.keys not in ("product", "flat"):
            what = f"{config.keys} keys depend on the model around them: on its layers, or on ids of tokens"
            errors.append(UserError(what, "keys", "choose product or flat, or train with a config"))
    if errors:
        raise UserErrors("ProductKeyMemory cannot be made of these settings", errors)
    return config
