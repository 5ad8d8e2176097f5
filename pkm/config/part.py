"""What every schema is made of: a section, and numbers with bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _fits_64_bits(number: int) -> int:
    if number >= 2**63:
        raise ValueError("more than a computer counts to; choose a number below 2^63")
    return number


def _in_fp32(number: float) -> float:
    if number and not 1e-38 <= number <= 3e38:
        raise ValueError(f"{number:g} is {'0' if number < 1 else 'infinite'} in fp32, in which models are updated")
    return number


def _finite_ratio(ratio: str) -> str:
    if not 1e-38 <= float(ratio.removesuffix("x")) <= 3e38:
        raise ValueError(f"{ratio} is no ratio of two learning rates: choose one above 0 that is not beyond fp32")
    return ratio


Positive = Annotated[int, Field(gt=0), AfterValidator(_fits_64_bits)]
Natural = Annotated[int, Field(ge=0), AfterValidator(_fits_64_bits)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_in_fp32)]
Decay = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_in_fp32)]
Weight = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
"""Of a loss that is learned from beside the one that is told, whose weight is 1."""
RATIO = r"^(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?x$"
Ratio = Annotated[
    str,
    Field(pattern=RATIO, json_schema_extra={"patternErrorMessage": "a ratio to optim.dense.lr, as 15x"}),
    AfterValidator(_finite_ratio),
]
Probability = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Where = Annotated[Path, AfterValidator(Path.expanduser)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Part(BaseModel):
    """A section of the file: frozen, and closed to keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, use_attribute_docstrings=True)
