"""The result of a run: rewards, files and duration."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class RunSummary:
    """The result of a run: rewards, files and duration. As text it is a short table; notebooks show one, too."""

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

    def rows(self) -> list[tuple[str, str]]:
        """The run in a few rows of name and text."""
        rows = [("run", self.run), ("iterations", f"{len(self.iterations)} in {self.wall_s:.0f} s")]
        if len(self.evaluations) >= 2:
            change = f"{self.reward_before:.3f} before, {self.reward_after:.3f} after"
            rows.append(("held-out reward", f"{change}, {self.evaluations[-1]['num']:,} questions"))
        trained = [float(values.get("reward", math.nan)) for values in self.iterations]
        if trained:
            rows.append(("training reward", f"{trained[0]:.3f} in the first iteration, {trained[-1]:.3f} in the last"))
            tokens = sum(int(values.get("generated_tokens", 0)) for values in self.iterations)
            rows.append(("tokens generated", f"{tokens:,}"))
            if failures := sum(int(values.get("left_out", 0)) for values in self.iterations):
                rows.append(("left out", f"{failures:,} trajectories that failed; libra inspect RUN --failed"))
        rows.append(("directory", str(self.directory)))
        rows += [(name, str(path)) for name, path in (("model", self.checkpoint), ("best model", self.best)) if path]
        return rows

    def __str__(self) -> str:
        return "\n".join(f"{name:<17} {text}" for name, text in self.rows())

    def _repr_html_(self) -> str:
        cells = "".join(
            f'<tr><th style="text-align:left">{html.escape(name)}</th><td style="text-align:left">{html.escape(text)}</td></tr>'
            for name, text in self.rows()
        )
        return f"<table>{cells}</table>"
