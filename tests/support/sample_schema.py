"""A schema that is not a run's, with every kind of setting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Oven(Part):
    degrees: Annotated[int, Field(gt=0, le=300)] = 180
    """Celsius."""
    fan: bool = True
    gas: float | None = None


class Jam(Part):
    kind: Literal["jam"]
    fruit: str


class Cream(Part):
    kind: Literal["cream"]
    fat: float


class Cake(Part):
    name: str
    eggs: Annotated[int, Field(gt=0)]
    sugar: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    glaze: Literal["lemon", "cocoa", "none"] = "none"
    oven: Oven = Oven()
    stand: Oven | None = None
    tins: tuple[Annotated[int, Field(gt=0)], ...] = ()
    size: tuple[int, int] = (20, 5)
    path: Path = Path("out")
    layers: list[Annotated[Jam | Cream, Field(discriminator="kind")]] = []
    notes: dict[str, str] = {}

    @field_validator("name")
    @classmethod
    def _not_pie(cls, name: str) -> str:
        if name == "pie":
            raise ValueError("a pie is no cake")
        return name


def too_sweet(cake: Cake) -> list[tuple[str, str, str]]:
    return [("sugar", f"{cake.sugar} is too sweet for {cake.eggs} eggs", "less")] if cake.sugar > cake.eggs else []
