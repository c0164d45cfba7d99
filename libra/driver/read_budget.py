"""How much of a run's files a check reads."""

from __future__ import annotations


class ReadBudget:
    """Bytes that may be read; None: all."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._left = limit_bytes

    def allows(self, num_bytes: int) -> bool:
        """Whether this many more bytes may be read."""
        if self._left is None:
            return True
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True
