"""What a check of `libra doctor` is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes
    ----------
    name : str
        What was looked at.
    state : "ok", "warn" or "fail"
        "fail": a run cannot work or would be wrong; "warn": it works, and this may surprise.
    detail : str
        What was found.
    advice : str
        What to type; empty where all is well.
    """

    name: str
    state: State
    detail: str
    advice: str = ""
