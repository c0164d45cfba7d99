"""A step that is taken in waves: what was added to its gradient so far, and the numbers for its report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from libra.train.gradient_reduction import PartialGradient
from libra.train.step_report import Tally


@dataclass(slots=True)
class OpenStep:
    """Step ``step`` between its first wave and its end; the gradients themselves are the parameters' ``grad``.

    Attributes
    ----------
    waves : int
        Waves added.
    began_s : float
        Present, on the performance counter, less the seconds worked on the step; true within `working` only.
    """

    step: int
    waves: int = 0
    partial: PartialGradient = field(default_factory=PartialGradient)
    tally: Tally = field(default_factory=Tally)
    began_s: float = 0.0
    _worked_s: float = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around work on the step, whose seconds are added up."""
        self.began_s = time.perf_counter() - self._worked_s
        try:
            yield
        finally:
            self._worked_s = time.perf_counter() - self.began_s
