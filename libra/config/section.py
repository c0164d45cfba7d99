"""The base class of every section, types of its fields, and names of the user's own parts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

AtLeastZero = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
VariableNames = Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...], Field(strict=False)]
"""Names of environment variables."""


class Section(BaseModel):
    """A group of settings: unknown keys are refused, and values are strict and frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ArgumentError(ValueError):
    """A wrong argument in a mapping of arguments: model, place, and pydantic's report."""

    def __init__(self, kind: type[Section], owner: str, report: Any) -> None:
        super().__init__(f"{report['loc'][0]}: {report['msg']}")
        self.kind, self.owner, self.report = kind, owner, report


def arguments(kind: type[Section], given: dict[str, Any], owner: str) -> dict[str, Any]:
    """All arguments of ``kind`` as JSON values, with defaults; ArgumentError for the first
    error."""
    try:
        return kind(**given).model_dump(mode="json")
    except ValidationError as error:
        raise ArgumentError(kind, owner, error.errors(include_url=False)[0]) from None


_NAMED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
FORM = "package.module:attribute"


@dataclass(frozen=True, slots=True)
class OwnOr:
    """Metadata of a text field: one of ``names``, or a user's own part."""

    names: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The allowed values in words."""
        shipped = f"one of {', '.join(self.names)}, or " if self.names else ""
        return f"{shipped}{FORM} of your own"

    def check(self, given: str) -> str:
        """``given`` if it is allowed."""
        if given in self.names or _NAMED.fullmatch(given):
            return given
        raise PydanticCustomError("own_part", "not the name of a part")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))


OwnPart = Annotated[str, OwnOr()]
"""``package.module:attribute`` only."""
