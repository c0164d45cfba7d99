"""Immutable weight versions, published whole, pulled by number, and checked before they are served."""

from libra.weights.weight_store import WeightStore, WeightVersion

__all__ = ["WeightStore", "WeightVersion"]
