"""The result of a check of `libra doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes
    ----------
    name : str
        What was checked.
    state : "ok", "warn" or "fail"
        "fail": a run cannot work or would be wrong; "warn": it works with a limitation.
    detail : str
        What was found.
    advice : str
        What to type; empty if the check passed.
    """

    name: str
    state: State
    detail: str
    advice: str = ""
