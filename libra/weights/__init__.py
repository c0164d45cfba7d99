"""Immutable weight versions: published whole, pulled by number, checked before use."""

from libra.weights.weight_store import WeightStore, WeightVersion

__all__ = ["WeightStore", "WeightVersion"]
