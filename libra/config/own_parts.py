"""The type of settings that take the name of a part that ships, or ``package.module:attribute`` of one's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

_NAMED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
FORM = "package.module:attribute"


@dataclass(frozen=True, slots=True)
class OwnOr:
    """Metadata of a text field: one of ``names``, or a part of one's own."""

    names: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """What the field allows."""
        shipped = f"one of {', '.join(self.names)}, or " if self.names else ""
        return f"{shipped}{FORM} of your own"

    def check(self, given: str) -> str:
        """``given``, if it is allowed."""
        if given in self.names or _NAMED.fullmatch(given):
            return given
        raise PydanticCustomError("own_part", "it is no name of a part")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))


OwnPart = Annotated[str, OwnOr()]
"""``package.module:attribute`` only."""
