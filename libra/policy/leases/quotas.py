"""Limits of what belongs to no worker: calls of an external API per second, or at once.

Invariants
----------
1. A rate of ``units`` per ``per_s``: grants in any window [t, t + per_s) hold at most ``units`` units. (A bucket of tokens would
   let twice as many through in a window that begins when it is full.)
2. A number at once: leases hold at most so many units.
3. Asking changes nothing; only a grant, a release and a later time do.
"""

from __future__ import annotations

import re
from collections import deque

from libra.errors import ConfigError

SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_RATE = re.compile(r"\s*(\d+)\s*/\s*(s|min|h)\s*")


class Quota:
    """One limit.

    Parameters
    ----------
    units : int
    per_s : float or None
        Length of the window, in seconds; None: ``units`` at once.
    """

    def __init__(self, units: int, per_s: float | None) -> None:
        self.units, self.per_s = units, per_s
        self.held = 0
        self._granted: deque[tuple[float, int]] = deque()  # of a rate: (time, units), of the newest window
        self._in_window = 0

    def may(self, at_s: float, units: int = 1) -> bool:
        """Whether ``units`` may be granted at ``at_s``."""
        if self.per_s is None:
            return self.held + units <= self.units
        return self.next_s(at_s, units) <= at_s

    def next_s(self, at_s: float, units: int = 1) -> float:
        """When ``units`` may be granted, as far as time alone decides: ``at_s`` or later; infinite for a number at once that is
        held, or for more than there are."""
        if units > self.units:
            return float("inf")
        if self.per_s is None:
            return at_s if self.held + units <= self.units else float("inf")
        left, soonest_s = self._in_window, at_s
        for granted_s, had in self._granted:
            if left + units <= self.units and granted_s + self.per_s > at_s:
                break
            left -= had
            soonest_s = max(at_s, granted_s + self.per_s)
        return soonest_s

    def take(self, at_s: float, units: int = 1) -> None:
        """``units`` are granted at ``at_s``; times do not go back."""
        assert self.may(at_s, units)
        self.held += units
        if self.per_s is None:
            return
        while self._granted and self._granted[0][0] + self.per_s <= at_s:
            self._in_window -= self._granted.popleft()[1]
        self._granted.append((at_s, units))
        self._in_window += units

    def give_back(self, units: int = 1) -> None:
        """A lease of ``units`` has ended; of a rate its units stay in the window."""
        self.held -= units

    def limits(self, other: Quota) -> bool:
        """Whether ``other`` is the same limit."""
        return (self.units, self.per_s) == (other.units, other.per_s)


def read_quota(name: str, text: str | int) -> Quota:
    """The quota that a configuration names: ``10/s``, ``300/min``, ``5000/h``, or a number of calls at once, ``4``.

    Raises ConfigError for anything else.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return Quota(text, None)
    found = _RATE.fullmatch(text) if isinstance(text, str) else None
    if isinstance(text, str) and text.strip().isdigit() and int(text) > 0:
        return Quota(int(text), None)
    if found is None or int(found[1]) < 1:
        raise ConfigError(
            f"quota {name!r}: got {text!r}; type a rate such as 10/s, 300/min or 5000/h, or how many calls there may be at once, "
            "such as 4"
        )
    return Quota(int(found[1]), SECONDS[found[2]])
