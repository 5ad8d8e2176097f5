"""What `lr: auto` means: learning rates that were best for short runs, as a function of the model's width (docs/recipes.md).

Found at widths 32 to 128; a wider model is an extrapolation. In the spirit of muP (Yang et al., 2022): matrices learn the
slower the wider they are, tables, which a token meets row by row, do not.
"""

from __future__ import annotations

TUNED_WIDTH = 128


def learning_rates(dim: int) -> dict[str, float]:
    """Peak rates of a model of width `dim`, by group."""
    dense = 1e-2 * TUNED_WIDTH / dim
    return {"dense": dense, "embeddings": 10 * dense, "addressing": 0.3 * dense, "values": 0.5}
