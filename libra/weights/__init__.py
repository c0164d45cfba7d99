"""Weights: immutable versions, published whole, pulled by number, and checked in the engine before they are served."""

from __future__ import annotations

from libra.weights.changes import expected_columns
from libra.weights.registry import WeightStore, WeightVersion
from libra.weights.verify import (
    Answers,
    Calibration,
    Expected,
    Verdict,
    VersionCheck,
    as_first,
    calibrate,
    judge,
    uncalibrated,
)

__all__ = [
    "Answers",
    "Calibration",
    "Expected",
    "Verdict",
    "VersionCheck",
    "WeightStore",
    "WeightVersion",
    "as_first",
    "calibrate",
    "expected_columns",
    "judge",
    "uncalibrated",
]
