"""Resources that workers supply and leases hold, and quotas, which belong to no worker.

Invariants
----------
1. At a rate of ``units`` per ``per_s``, grants in any window [t, t + per_s) total at most
   ``units``. (A token bucket would let twice as many through.)
2. Under a limit without a window, leases hold at most ``units`` at once.
3. Querying a quota has no side effects; only a grant, a release or a later time changes it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

import msgspec

from libra.errors import ConfigError

KINDS = ("slots", "cores", "memory", "gpus")
"""Kinds that belong to a worker, in the order of `Resources.local`; a quota is ``quota NAME``."""


class Resources(msgspec.Struct, frozen=True, gc=False):
    """Amounts of each kind; every action takes one TOOL slot."""

    slots: int = 0
    cores: int = 0  # for the holder alone; one of 0 cores shares those that are not leased
    memory_bytes: int = 0
    gpus: int = 0
    quotas: tuple[tuple[str, int], ...] = ()  # units of limits that belong to no worker

    @classmethod
    def of(cls, amounts: Sequence[int]) -> Resources:
        slots, cores, memory_bytes, gpus = amounts
        return cls(slots, cores, memory_bytes, gpus)

    @property
    def local(self) -> tuple[int, int, int, int]:
        return self.slots, self.cores, self.memory_bytes, self.gpus

    @property
    def kinds(self) -> frozenset[str]:
        own = (kind for kind, amount in zip(KINDS, self.local, strict=True) if amount)
        return frozenset((*own, *(quota_kind(name) for name, _ in self.quotas)))

    def with_cores(self, cores: int) -> Resources:
        return msgspec.structs.replace(self, cores=cores)


def plus(amounts: Sequence[int], more: Sequence[int], times: int = 1) -> list[int]:
    return [amount + times * each for amount, each in zip(amounts, more, strict=True)]


def covers(has: Sequence[int], need: Sequence[int]) -> bool:
    return all(amount >= want for amount, want in zip(has, need, strict=True))


def quota_kind(name: str) -> str:
    return f"quota {name}"


def described(resources: Resources) -> str:
    cores, gpus = resources.cores, resources.gpus
    words = [
        f"{cores} core{'s' if cores > 1 else ''}" if cores else "",
        f"{resources.memory_bytes / 2**30:g} GiB" if resources.memory_bytes else "",
        f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "",
        *(f"{units} of quota {name}" for name, units in resources.quotas),
    ]
    return ", ".join(filter(None, words)) or ("a slot" if resources.slots else "nothing")


class LeaseRequest(msgspec.Struct, frozen=True, gc=False):
    holder: str
    least: Resources  # below which it does not run
    tool: str = ""  # whose curve and seconds apply
    home: str = ""  # worker that it takes if it fits there
    revocable: bool = False  # for a request that does not fit


class Lease(msgspec.Struct, frozen=True, gc=False):
    """Resources that a holder keeps until it releases them or its worker leaves."""

    holder: str
    worker: str
    resources: Resources  # ``cores`` may be above the request's
    least_cores: int
    tool: str
    granted_s: float
    revocable: bool = False
    reason: str = ""


class Revoke(msgspec.Struct, frozen=True, gc=False):
    """Stop ``holder``'s action ``ran_s`` after its grant; its lease stays until released."""

    holder: str
    worker: str
    ran_s: float
    reason: str


SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_QUOTA = re.compile(r"\s*(\d+)\s*(?:/\s*(s|min|h)\s*)?")


class Quota:
    """A limit of ``units`` per ``per_s`` seconds, or at once if ``per_s`` is None."""

    def __init__(self, units: int, per_s: float | None) -> None:
        self.units, self.per_s = units, per_s
        self.held = 0
        self._granted: deque[tuple[float, int]] = deque()  # (time, units) in the window
        self._in_window = 0

    def may(self, at_s: float, units: int = 1) -> bool:
        if self.per_s is None:
            return self.held + units <= self.units
        return self.next_s(at_s, units) <= at_s

    def next_s(self, at_s: float, units: int = 1) -> float:
        """Earliest time at which ``units`` can be granted without a release; infinite if never."""
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
        assert self.may(at_s, units)
        self.held += units
        if self.per_s is None:
            return
        while self._granted and self._granted[0][0] + self.per_s <= at_s:
            self._in_window -= self._granted.popleft()[1]
        self._granted.append((at_s, units))
        self._in_window += units

    def give_back(self, units: int = 1) -> None:
        """A lease of ``units`` has ended; the units of a rate stay in its window."""
        self.held -= units


def read_quota(name: str, text: str | int) -> Quota:
    """The quota of ``10/s``, ``300/min``, ``5000/h`` or ``4`` (at once); else ConfigError."""
    found = None if isinstance(text, bool) else _QUOTA.fullmatch(str(text))
    if found is None or int(found[1]) < 1:
        raise ConfigError(
            f"quota {name!r}: got {text!r}; type a rate such as 10/s, 300/min or 5000/h, or the number of calls at once, such as 4"
        )
    return Quota(int(found[1]), SECONDS[found[2]] if found[2] else None)
