"""Train language models with product-key memories from one YAML file; or put such a memory into a model of your own.

from pkm import ProductKeyMemory, optimizers
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pkm.memory.optimizers import optimizers
    from pkm.memory.product_key_memory import ProductKeyMemory

__version__ = "0.1.0"
__all__ = ["ProductKeyMemory", "optimizers"]


def __getattr__(name: str) -> Any:
    """Import them when they are asked for: they need torch, which takes seconds and which the rest may not need."""
    if name == "ProductKeyMemory":
        return import_module("pkm.memory.product_key_memory").ProductKeyMemory
    if name == "optimizers":
        return import_module("pkm.memory.optimizers").optimizers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
