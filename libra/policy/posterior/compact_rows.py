"""Compact rows of a running trajectory: eleven 16-bit numbers per tool return, and the state for its next one.

Invariants
----------
1. Row 0 is the start, before anything was generated; row i is the i-th tool return. At most ``MAX_ROWS`` are kept.
2. Forecasting and learning see the same columns: both use the numbers as stored, in 16 bits.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STRIDE = 11
"""Numbers per row: state, tokens so far (low, high), siblings (shift, information, remaining), family's shift, and four
forecasts as made then: progress-only (order, mean) and the unguarded mixture (order, mean)."""
MAX_ROWS = 257
"""Later returns are not learned from (their 24 bytes each would add up); forecasts continue."""
CHUNK = 16 * STRIDE
"""Numbers of a chunk of `Rows`: small enough for the allocator of small objects, which does not fragment."""
LOG_STEPS = 4000.0
"""Steps per unit of a stored logarithm: 0.025 % of a number of tokens, up to e**16."""
SHIFT_STEPS = 4000.0
SHIFT_ZERO = 32768
LARGEST = 65535
START = 0
"""State of row 0."""


class Rows:
    """The rows of one trajectory, as numbers one after another, in chunks of one size.

    A hundred thousand arrays that grow row by row would waste as much memory in gaps as they hold.
    """

    __slots__ = ("_full", "_last")

    def __init__(self) -> None:
        self._full: tuple[bytes, ...] = ()
        self._last = array("H")

    def __len__(self) -> int:
        return len(self._full) * CHUNK + len(self._last)

    def add(self, row: tuple[int, ...]) -> None:
        """One more row, ``STRIDE`` numbers of 16 bits."""
        if len(self._last) == CHUNK:
            self._full += (self._last.tobytes(),)
            self._last = array("H")
        self._last.extend(row)

    def tobytes(self) -> bytes:
        """All rows, two bytes a number as this machine orders them."""
        return b"".join((*self._full, self._last.tobytes()))

    @classmethod
    def frombytes(cls, numbers: bytes) -> Rows:
        """Load the output of `tobytes`."""
        rows, at = cls(), 0
        whole = []
        while len(numbers) - at > 2 * CHUNK:
            whole.append(numbers[at : at + 2 * CHUNK])
            at += 2 * CHUNK
        rows._full = tuple(whole)
        rows._last.frombytes(numbers[at:])
        return rows


class Live:
    """A running trajectory."""

    __slots__ = (
        "family",
        "group",
        "imputed",
        "information",
        "mean",
        "missed",
        "node",
        "order",
        "pending",
        "returns",
        "rows",
        "slot",
        "tokens",
        "tree",
    )

    def __init__(self, group: str, family: str, slot: int) -> None:
        self.group = group
        self.family = family
        self.slot = slot  # row of the pool of decayed counts
        self.tokens = 0  # generated so far
        self.pending = 0  # of these, since the last return
        self.returns = 0
        self.rows = Rows()
        self.node = 0  # hash of the path of states
        self.missed = 0  # returns since the path was known to the tree
        self.tree: tuple[float, float] = (0.0, 0.0)  # the tree's last forecast
        self.imputed = 0.0  # logarithm of the expected total, in its cohorts
        self.information = 0.0  # its weight in its cohorts, 0..1
        self.mean = 0.0
        self.order = 0.0


def stored_log(value: float) -> int:
    """A logarithm of tokens in 16 bits."""
    steps = int(value * LOG_STEPS + 0.5)
    return 0 if steps < 0 else LARGEST if steps > LARGEST else steps


def stored_shift(value: float) -> int:
    """A signed logarithm in 16 bits, -8 to 8."""
    steps = int(value * SHIFT_STEPS + 32768.5)
    return 0 if steps < 0 else LARGEST if steps > LARGEST else steps


def log_tokens(tokens: float) -> float:
    """Logarithm of a number of tokens, of at least one."""
    return math.log(tokens) if tokens > 1.0 else 0.0


class Table:
    """The rows of trajectories as columns, one trajectory after the other, for learning.

    Attributes
    ----------
    parts : list of slice
        The rows of each trajectory.
    state : int array (N,)
    tokens : float array (N,)
        Generated before the return.
    stored : float array (N, 8)
        Siblings' shift, information, log remaining; family's shift; log order and mean of progress-only and mixture.
    """

    __slots__ = ("parts", "state", "stored", "tokens")

    def __init__(self, trajectories: Sequence[Rows]) -> None:
        ends = list(accumulate((len(rows) // STRIDE for rows in trajectories), initial=0))
        self.parts = [slice(*ends) for ends in pairwise(ends)]
        numbers = np.frombuffer(b"".join(rows.tobytes() for rows in trajectories), dtype=np.uint16).reshape(-1, STRIDE)
        self.state = numbers[:, 0].astype(np.int64)
        self.tokens = numbers[:, 1] + 65536.0 * numbers[:, 2]
        self.stored: Floats = numbers[:, 3:].astype(np.float64)
        self.stored[:, (0, 3)] = (self.stored[:, (0, 3)] - SHIFT_ZERO) / SHIFT_STEPS
        self.stored[:, (1, 2, 4, 5, 6, 7)] /= LOG_STEPS
