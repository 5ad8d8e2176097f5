"""What every schema is made of: a section, and numbers with bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _fits_64_bits(number: int) -> int:
    if number >= 2**63:
        raise ValueError("more than a computer counts to; choose a number below 2^63")
    return number


Positive = Annotated[int, Field(gt=0), AfterValidator(_fits_64_bits)]
Natural = Annotated[int, Field(ge=0), AfterValidator(_fits_64_bits)]


class Part(BaseModel):
    """A section of the file: frozen, and closed to keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, use_attribute_docstrings=True)
