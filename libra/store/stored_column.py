"""What one array of the trajectory store is: its name, type, meaning, and value where nothing is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_FILL: Mapping[str, int | float | str] = {
    "int16": -1,
    "int32": -1,
    "int64": -1,
    "float32": float("nan"),
    "float64": float("nan"),
    "bool": False,
    "string": "",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One array of a level. ``unknown`` is its value for unknown entries: -1, NaN or the empty string."""

    name: str
    dtype: str
    meaning: str

    @property
    def unknown(self) -> int | float | str:
        """Value of a row without one."""
        return _FILL[self.dtype]

    def numpy_dtype(self) -> np.dtype[Any]:
        """The type of this column in memory."""
        return np.dtypes.StringDType() if self.dtype == "string" else np.dtype(self.dtype)
