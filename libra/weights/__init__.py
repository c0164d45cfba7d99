"""Weights: immutable versions, published whole and pulled by number."""

from __future__ import annotations

from libra.weights.registry import WeightStore, WeightVersion

__all__ = ["WeightStore", "WeightVersion"]
