"""The result of a run: rewards, files and duration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class RunSummary:
    """The result of a run: rewards, files and duration."""

    run: str
    directory: Path
    iterations: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: Path | None = None
    best: Path | None = None
    wall_s: float = 0.0

    @property
    def reward_before(self) -> float:
        """Mean reward on the held-out questions before the first step; NaN if none were asked."""
        return float(self.evaluations[0]["reward"]) if self.evaluations else math.nan

    @property
    def reward_after(self) -> float:
        """The same after the last step."""
        return float(self.evaluations[-1]["reward"]) if self.evaluations else math.nan
