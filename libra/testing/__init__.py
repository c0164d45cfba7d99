"""For tests of your own engines and environments: `libra.testing.engines.EngineContract`, and environments without a task."""

from __future__ import annotations

from libra.testing.environments import DriftingPrompts, FixedTurns, GrowingPrompts, TraceTurns

__all__ = ["DriftingPrompts", "FixedTurns", "GrowingPrompts", "TraceTurns"]
