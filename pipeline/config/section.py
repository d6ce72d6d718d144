"""What every part of the configuration has in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the configuration: immutable, and strict about its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
