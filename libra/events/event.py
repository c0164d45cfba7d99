"""What all events have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened ``t_s`` seconds after the start of ``run``."""

    name: ClassVar[str] = ""
    run: str
    t_s: float
