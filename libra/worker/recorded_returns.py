"""What the record of an action has of a tool's return: what the model read, or of a large one its beginning and the reference."""

from __future__ import annotations

from dataclasses import replace

from libra.types import ToolReturn, ToolStatus
from libra.untrusted import storable

MOST_RECORDED_CHARS = 8000
"""Characters that a record has of a return that is kept by reference (`libra.store.observations`)."""


def recorded(given: ToolReturn, content: str) -> ToolReturn:
    """A tool's return for its record; ``content`` is what the model reads of it, whose tokens are in the record whole."""
    if content != given.content:
        status = ToolStatus.TRUNCATED if given.status is ToolStatus.OK else given.status
        given = replace(given, content=storable(content), status=status)
    if not given.reference or len(given.content) <= MOST_RECORDED_CHARS:
        return given
    kept = given.content[:MOST_RECORDED_CHARS]
    note = f"[{len(given.content) - len(kept)} more characters in {given.reference}]"
    return replace(given, content=f"{kept}\n{note}")
