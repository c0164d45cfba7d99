"""Attributes of an object as JSON, for snapshots of policies: numbers, words, and arrays as nested lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def save(subject: object, names: Iterable[str]) -> dict[str, Any]:
    """These attributes by name."""
    values = ((name, getattr(subject, name)) for name in names)
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values}


def load(subject: object, names: Iterable[str], snapshot: Mapping[str, Any]) -> None:
    """Set these attributes; each keeps its type, an array its shape. KeyError, TypeError or ValueError if that is impossible."""
    for name in names:
        before, value = getattr(subject, name), snapshot[name]
        if isinstance(before, np.ndarray):
            setattr(subject, name, np.array(value, dtype=before.dtype).reshape(before.shape))
        else:
            setattr(subject, name, type(before)(value))
