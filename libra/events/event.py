"""The base of all events."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec


def _tag(class_name: str) -> str:
    """``TrajectoryParked`` -> ``trajectory_parked``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag=_tag, gc=False):
    """Something that happened ``t_s`` seconds after the start of ``run``. ``name`` is the class's name in snake case."""

    name: ClassVar[str] = ""
    run: str
    t_s: float

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = _tag(cls.__name__)
