"""The base class of every section of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

AtLeastZero = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
VariableNames = Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...], Field(strict=False)]
"""Names of environment variables."""


class Section(BaseModel):
    """A group of settings: unknown keys are refused, values are strict and cannot change afterwards."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
