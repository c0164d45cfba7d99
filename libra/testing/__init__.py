"""For tests of your own parts: `libra.testing.engines.EngineContract`, the contracts of `libra.testing.parts`, and environments
without a task."""

from __future__ import annotations

from libra.testing.environments import DriftingPrompts, FixedTurns, GrowingPrompts, TraceTurns

__all__ = ["DriftingPrompts", "FixedTurns", "GrowingPrompts", "TraceTurns"]
