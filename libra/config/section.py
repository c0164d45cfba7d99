"""The base class of every section of a configuration."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

AtLeastZero = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
VariableNames = Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...], Field(strict=False)]
"""Names of environment variables."""


class Section(BaseModel):
    """A group of settings: unknown keys are refused, values are strict and cannot change afterwards."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ArgumentError(ValueError):
    """A wrong argument in a mapping of arguments: its model, the place that has them, and pydantic's report."""

    def __init__(self, kind: type[Section], owner: str, report: Any) -> None:
        super().__init__(f"{report['loc'][0]}: {report['msg']}")
        self.kind, self.owner, self.report = kind, owner, report


def arguments(kind: type[Section], given: dict[str, Any], owner: str) -> dict[str, Any]:
    """All arguments of ``kind``, defaults included; ArgumentError for the first wrong one."""
    try:
        return kind(**given).model_dump()
    except ValidationError as error:
        raise ArgumentError(kind, owner, error.errors(include_url=False)[0]) from None
