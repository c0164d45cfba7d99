"""The number of tool workers: more if actions wait long, fewer if workers idle.

`ordered` decides from the facts of one moment alone, so that a log replays the decision;
`ToolFleet` collects these facts. A worker costs its start plus `IDLE_S` of idling. For each waiting
action it saves half the time by which the queue drains sooner.

Invariants
----------
1. ``least <= wanted <= most``.
2. More workers are requested only after actions have waited for `HOLD` starts, only if work would
   still wait once they start, and only as many as save more than they cost.
3. A worker is released only after `IDLE_S` or `HOLD` starts without work, while nothing waits and
   no worker starts; one at a time, never one of the first ``least``.
"""

from __future__ import annotations

from msgspec.structs import replace

from libra.facts import ToolWorkersOrdered

IDLE_S = 60.0
HOLD = 2.0
START_S = 15.0  # until a start was measured
NEWEST = 0.3


def ordered(facts: ToolWorkersOrdered) -> ToolWorkersOrdered | None:
    """``facts`` with another number of workers; None if it stays."""
    if facts.waiting and facts.wanted < facts.most:
        return _more(facts)
    if not facts.waiting and not facts.starting and facts.wanted > facts.least and facts.idle:
        worker, idle_s = max(facts.idle, key=lambda each: (each[1], each[0]))
        if idle_s >= max(IDLE_S, HOLD * facts.start_s):
            reason = f"{worker} has had nothing to do for {idle_s:.0f} s"
            return replace(facts, ordered=facts.wanted - 1, give_up=worker, reason=reason)
    return None


def _more(facts: ToolWorkersOrdered) -> ToolWorkersOrdered | None:
    if facts.starting or facts.behind_s < HOLD * facts.start_s:
        return None
    each = max(1, facts.units // max(1, facts.wanted))
    drained_s = facts.waiting_s / facts.units if facts.units else float("inf")
    left_s = facts.waiting_s - facts.units * facts.start_s  # after a worker's start
    if left_s <= 0:
        return None
    best: tuple[float, int, float] | None = None
    for more in range(1, facts.most - facts.wanted + 1):
        then_s = facts.start_s + left_s / (facts.units + more * each)
        saved_s = min(drained_s, 1e6) - then_s
        worth = facts.waiting * saved_s / 2 - more * (facts.start_s + IDLE_S)
        if worth > 0 and (best is None or worth > best[0]):
            best = worth, more, saved_s
    if best is None:
        return None
    _, more, saved_s = best
    waits = f"{facts.waiting} actions wait, for {facts.behind_s:.0f} s now"
    reason = f"{waits}; {more} more end that {saved_s:.0f} s sooner, and take {facts.start_s:.0f} s to start"
    return replace(facts, ordered=facts.wanted + more, give_up="", reason=reason)


class ToolFleet:
    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self.wanted = least
        self.start_s = START_S
        self._behind_since_s: float | None = None
        self._idle_since_s: dict[str, float] = {}
        self._asked_s: float | None = None

    def facts(
        self, at_s: float, *, present: frozenset[str], idle: frozenset[str], units: int, waiting: int, waiting_s: float
    ) -> ToolWorkersOrdered:
        """Facts of this moment; ``idle`` workers have no work and may be released."""
        if self._asked_s is not None and len(present) >= self.wanted:
            self.start_s += NEWEST * (at_s - self._asked_s - self.start_s)
            self._asked_s = None
        if not waiting:
            self._behind_since_s = None
        elif self._behind_since_s is None:
            self._behind_since_s = at_s
        self._idle_since_s = {name: self._idle_since_s.get(name, at_s) for name in sorted(idle & present)}
        behind_s = 0.0 if self._behind_since_s is None else round(at_s - self._behind_since_s, 6)
        idle_s = tuple((name, round(at_s - since_s, 6)) for name, since_s in self._idle_since_s.items())
        starting = max(0, self.wanted - len(present))
        return ToolWorkersOrdered(
            self.least, self.most, self.wanted, starting, units, waiting, round(waiting_s, 6), behind_s,
            round(self.start_s, 6), idle_s,
        )  # fmt: skip

    def follow(self, order: ToolWorkersOrdered, at_s: float) -> None:
        if order.ordered > self.wanted:
            self._asked_s = at_s
            self._behind_since_s = None
        self.wanted = order.ordered
        self._idle_since_s.pop(order.give_up, None)
