"""Immutable weight versions, published whole, pulled by number, and checked before they are served."""

from __future__ import annotations

from libra.weights.registry import WeightStore, WeightVersion
from libra.weights.version_check import (
    Answers,
    CheckVerdict,
    ExpectedProbes,
    ProbeCalibration,
    VersionCheck,
    as_first,
    calibrate,
    expected_columns,
    judge,
    uncalibrated,
)

__all__ = [
    "Answers",
    "CheckVerdict",
    "ExpectedProbes",
    "ProbeCalibration",
    "VersionCheck",
    "WeightStore",
    "WeightVersion",
    "as_first",
    "calibrate",
    "expected_columns",
    "judge",
    "uncalibrated",
]
