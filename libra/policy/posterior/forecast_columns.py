"""The columns of the linear forecasts: for one new return, and for a whole trajectory.

Invariants
----------
1. `Posterior._forecast` and `matrix` give the same columns for the same return, up to the 16 bits of what is stored.
"""

from __future__ import annotations

import math

import numpy as np

from libra.policy.posterior.compact_rows import MAX_ROWS, START, Floats, Table
from libra.types import ToolStatus

SIGNALS = ("last", "tree", "siblings", "family", "tools")
"""Signals beside progress, in the order of their columns."""

PROGRESS = 4
TOOL_SLOTS = 24
"""Tools counted by name, the last slot for all others."""
DECAY = 0.85
"""A tool's count after each later return; half-life 4 returns."""
TOKEN_SCALE = 1e-3

OUTCOMES = tuple(ToolStatus)
"""All outcomes. Each but the first (the ordinary one) has its own decayed count."""
_OUTCOME: dict[str, int] = {status: number for number, status in enumerate(OUTCOMES)}
_PAYLOAD = TOOL_SLOTS + len(OUTCOMES) - 1  # tools, outcomes but the first, then the payload's size
_COUNTED = _PAYLOAD + 1
_WIDTHS = {"tools": _COUNTED, "last": 2, "tree": 2, "siblings": 4, "family": 1}

OFFSETS: dict[str, slice] = {}
_next = PROGRESS
for _signal in SIGNALS:
    OFFSETS[_signal] = slice(_next, _next + _WIDTHS[_signal])
    _next += _WIDTHS[_signal]
WIDTH = _next
"""Number of columns."""
_SIBLINGS, _FAMILY, _TOOLS = (OFFSETS[name].start for name in SIGNALS[2:])
NUM_FEW = _TOOLS
"""Columns before the tools' counts."""

PAYLOADS = 3
PAYLOAD_TOKENS = (125, 1250)
"""Bounds of the payload classes: 500 and 5,000 characters at four to a token, as in the paper's published code."""
TOOLS = 64
"""Tools with states of their own, the last for all others."""


def state_of(tool: int, status: str, payload_tokens: int) -> int:
    """Number of the tool-return state (tool, outcome, payload class); 0 is the start, so never that.

    ValueError for a status that is not one of `OUTCOMES`.
    """
    try:
        outcome = _OUTCOME[status]
    except KeyError:
        raise ValueError(f"status {status!r} is not a tool outcome; allowed are {', '.join(OUTCOMES)}") from None
    size = 0 if payload_tokens <= PAYLOAD_TOKENS[0] else 1 if payload_tokens <= PAYLOAD_TOKENS[1] else 2
    return 1 + (tool * len(OUTCOMES) + outcome) * PAYLOADS + size


def tool_of(state: int) -> int:
    """Number of the tool of a state that is not the start."""
    return (state - 1) // (len(OUTCOMES) * PAYLOADS)


def _contributions() -> Floats:
    """What each state adds to the decayed counts, (states, counted)."""
    states = 1 + TOOLS * len(OUTCOMES) * PAYLOADS
    adds = np.zeros((states, _COUNTED))
    for state in range(1, states):
        outcome, size = (state - 1) // PAYLOADS % len(OUTCOMES), (state - 1) % PAYLOADS
        adds[state, min(tool_of(state), TOOL_SLOTS - 1)] = 1.0
        if outcome:
            adds[state, TOOL_SLOTS + outcome - 1] = 1.0
        adds[state, _PAYLOAD] = size
    return adds


ADDS = _contributions()


def progress(tokens: float, returns: int, last_tokens: float) -> tuple[float, float, float, float]:
    """The progress columns: constant, and logarithms of tokens and returns so far and of the last turn's tokens.

    Logarithms only: with plain numbers the few longest trajectories dominate the fit, and learning from running trajectories
    diverges.
    """
    return 1.0, math.log1p(tokens), math.log1p(returns), math.log1p(last_tokens)


def matrix(table: Table) -> Floats:
    """Columns of every row of the trajectories, (N, WIDTH); those of ``last`` and ``tree`` are 0, see `residuals`."""
    state, tokens, stored = table.state, table.tokens, table.stored
    x = np.zeros((len(state), WIDTH))
    x[:, 0] = 1.0
    before = np.zeros(len(state))
    before[1:] = tokens[:-1]
    returns, counts = np.empty(len(state)), np.empty((len(state), _COUNTED))
    adds = ADDS[state]
    for part in table.parts:
        assert state[part.start] == START
        before[part.start] = 0.0
        num_rows = part.stop - part.start
        returns[part] = _NUMBERS[:num_rows]
        np.matmul(decays(num_rows), adds[part], out=counts[part])
    x[:, 1] = np.log1p(tokens)
    x[:, 2] = np.log1p(returns)
    x[:, 3] = np.log1p(tokens - before)
    x[:, OFFSETS["tools"]] = np.log1p(counts)
    x[:, _SIBLINGS] = stored[:, 0]
    x[:, _SIBLINGS + 1] = stored[:, 1]
    x[:, _SIBLINGS + 2] = stored[:, 1] * stored[:, 2]
    x[:, _SIBLINGS + 3] = stored[:, 1] * np.exp(stored[:, 2]) * TOKEN_SCALE
    x[:, _FAMILY] = stored[:, 3]
    return x


_NUMBERS = np.arange(MAX_ROWS, dtype=np.float64)
_DECAYS: dict[int, Floats] = {}


def decays(num_rows: int) -> Floats:
    """Weight of what happened at row j in the count at row i, (num_rows, num_rows)."""
    known = _DECAYS.get(num_rows)
    if known is None:
        age = np.arange(num_rows)[:, None] - np.arange(num_rows)[None, :]
        known = _DECAYS[num_rows] = np.where(age >= 0, DECAY ** np.maximum(age, 0), 0.0)
    return known


class Pool:
    """The decayed counts of all running trajectories in one array; rows are reused.

    A row takes 116 bytes, an array of its own 228.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((64, _COUNTED), dtype=np.float32)
        self._free = list(range(63, -1, -1))

    def take(self) -> int:
        """A row of zeros."""
        if not self._free:
            size = len(self.counts)
            more = max(64, size // 4)
            self.counts = np.concatenate([self.counts, np.zeros((more, _COUNTED), dtype=np.float32)])
            self._free = list(range(size + more - 1, size - 1, -1))
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Free the row."""
        self.counts[slot] = 0.0
        self._free.append(slot)
