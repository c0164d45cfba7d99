"""What tests and benchmarks of Libra, and of environments made for it, can share."""

from __future__ import annotations

from libra.testing.environments import DriftingPrompts, FixedTurns, GrowingPrompts, TraceTurns

__all__ = ["DriftingPrompts", "FixedTurns", "GrowingPrompts", "TraceTurns"]
