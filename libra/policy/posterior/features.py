"""Features of a trajectory at a tool return, and its state between two of them.

A row, kept to learn from when its trajectory ends, is ``NUM_ROW`` 32-bit numbers: the features, the
tokens generated so far, and the forecasts as made then (progress alone: log order, mean; all
columns: log order, mean).
"""

from __future__ import annotations

import msgspec
import numpy as np

from libra.types import ToolStatus

PROGRESS = 4
"""Constant, and logarithms of tokens and returns so far and of the last turn's tokens. Logarithms
only: with plain numbers the few longest trajectories dominate the fit, and learning from running
trajectories diverges."""
SURE, SURE_LOG, SURE_TOKENS = PROGRESS + 1, PROGRESS + 2, PROGRESS + 3
"""Certainty of the siblings' totals, and its products with the log remainder and the remainder
(tokens) they give."""
NUM_FEW = PROGRESS + 5
"""Columns before the tools' counts: progress, four of siblings, one of the family."""
TOOL_SLOTS = 24
"""Tools counted by name, the last slot for all others."""
DECAY = np.float32(0.85)
"""A tool's count after each later return; half-life 4 returns."""
OUTCOMES = tuple(ToolStatus)
"""All outcomes. Each but the first (the ordinary one) has its own decayed count."""
_OUTCOME: dict[str, int] = {status: TOOL_SLOTS + number - 1 for number, status in enumerate(OUTCOMES)}
_PAYLOAD = TOOL_SLOTS + len(OUTCOMES) - 1
COUNTED = _PAYLOAD + 2
"""Decayed counts: tools, outcomes but the first, payloads by class; then the last payload's tokens."""
PAYLOAD_TOKENS = (125, 1250)
"""Bounds of the payload classes: 500 and 5,000 characters at four to a token, as in the paper's
published code."""
WIDTH = NUM_FEW + COUNTED
"""Number of columns."""
TOKENS, SERVED = WIDTH, WIDTH + 1
NUM_ROW = SERVED + 4
MAX_BYTES = 257 * 4 * NUM_ROW
"""Of a trajectory's rows: later returns are not learned from; forecasts continue."""
NO_COUNTS = np.zeros(COUNTED, dtype=np.float32).tobytes()


def counted(counts: bytes, slot: int, status: str, payload_tokens: int) -> bytes:
    """The decayed counts (float32) after one more return of the tool in ``slot``.

    ValueError for a status that is not one of `OUTCOMES`.
    """
    try:
        outcome = _OUTCOME[status]
    except KeyError:
        raise ValueError(f"status {status!r} is not a tool outcome; allowed are {', '.join(OUTCOMES)}") from None
    after = np.frombuffer(counts, dtype=np.float32) * DECAY
    after[slot] += 1.0
    if outcome >= TOOL_SLOTS:
        after[outcome] += 1.0
    if payload_tokens > PAYLOAD_TOKENS[0]:
        after[_PAYLOAD] += 1.0 if payload_tokens <= PAYLOAD_TOKENS[1] else 2.0
    after[_PAYLOAD + 1] = payload_tokens
    return after.tobytes()


class Live(msgspec.Struct, array_like=True, gc=False):
    """A running trajectory.

    Attributes
    ----------
    tokens, pending : int
        Generated so far; of these, since the last return.
    rows : bytes or None
        Rows to learn from; None: it is not followed.
    counts : bytes
        Decayed counts of what its tools returned.
    imputed, information : float
        Logarithm of its expected total, and its weight (0..1) in its group, its family and among
        all.
    mean, order : float
        Forecasts at its last return.
    """

    group: str
    family: str
    rows: bytes | None
    tokens: int = 0
    pending: int = 0
    returns: int = 0
    counts: bytes = NO_COUNTS
    imputed: float = 0.0
    information: float = 0.0
    mean: float = 0.0
    order: float = 0.0
