"""Leases of the actions of trajectories, in the order that the runs' orderings give.

The calls of one turn are one action: it holds what all of them need together. It is elastic if it
is a single call of an elastic tool. An action of tools that declare nothing takes a slot, and
shares the cores that no lease has. A single call of a revocable tool may be stopped once for
another action; then it runs to its end, so that none starves.
"""

from __future__ import annotations

from collections.abc import Mapping

from libra.errors import ConfigError
from libra.facts import ActionRequested, Priority, ToolCapacity, ToolNeeds, ToolsDeclared
from libra.policy.leases.elastic import SpeedUp
from libra.policy.leases.resources import Lease, LeaseRequest, Resources, Revoke, described, read_quota
from libra.policy.leases.table import LeaseTable

SLOT = Resources(slots=1)


class ActionLeases:
    """The lease table of a dispatcher, and the requests of its trajectories."""

    def __init__(self) -> None:
        self.table = LeaseTable()
        self._needs: dict[str, ToolNeeds] = {}
        self._asked: dict[str, tuple[str, ...]] = {}  # tools of a trajectory's next action
        self._slots: dict[str, int] = {}
        self._more: dict[str, ToolCapacity] = {}
        self._stopped: set[str] = set()  # whose action was stopped, and has not ended since
        self._revokes: list[Revoke] = []

    def declare(self, event: ToolsDeclared) -> None:
        for name, quota in event.quotas.items():
            self.table.limit(name, read_quota(name, quota))
        for name, needs in event.tools.items():
            self._needs[name] = needs
            if (curve := curve_of(name, needs)) is not None:
                self.table.declare(name, curve)

    def slots(self, worker: str, slots: int) -> None:
        self._slots[worker] = slots
        self._supply(worker)

    def capacity(self, event: ToolCapacity) -> None:
        self._more[event.worker] = event
        self._supply(event.worker)

    def left(self, worker: str) -> None:
        self._slots.pop(worker, None)
        self._more.pop(worker, None)
        self.table.withdraw(worker)

    def asked(self, event: ActionRequested) -> None:
        self._asked[event.key] = event.tools

    def wait(self, key: str, priority: Priority, home: str) -> None:
        tools = self._asked.get(key, ())
        single = tools[0] if len(tools) == 1 else ""
        revocable = single in self._needs and self._needs[single].revocable and key not in self._stopped
        self.table.request(LeaseRequest(key, self._least(tools), single, home, revocable=revocable), priority)

    def ended(self, key: str) -> None:
        self._stopped.discard(key)

    def forget(self, key: str) -> None:
        self._asked.pop(key, None)
        self._stopped.discard(key)
        self.table.cancel(key)
        self.table.release(key)

    def adopt(self, key: str, worker: str) -> None:
        """An action that began before leases holds its slot."""
        self.table.adopt(Lease(key, worker, SLOT, 0, "", 0.0, reason="began before"))

    def admit(self, at_s: float) -> tuple[Lease, ...]:
        granted: list[Lease] = []
        for each in self.table.admit(at_s):
            if isinstance(each, Revoke):
                self._stopped.add(each.holder)
                self._revokes.append(each)
            else:
                self._asked.pop(each.holder, None)
                granted.append(each)
        return tuple(granted)

    def revocations(self) -> tuple[Revoke, ...]:
        found = tuple(self._revokes)
        self._revokes.clear()
        return found

    def _supply(self, worker: str) -> None:
        more = self._more.get(worker) or ToolCapacity(worker, 0, 0, 0)
        slots = self._slots.get(worker, 0)
        self.table.supply(worker, Resources(slots, more.cores, more.memory_bytes, more.gpus))

    def _least(self, tools: tuple[str, ...]) -> Resources:
        needs = [self._needs[name] for name in tools if name in self._needs]
        if not needs:
            return SLOT
        units: dict[str, int] = {}
        for each in needs:
            if each.quota:
                units[each.quota] = units.get(each.quota, 0) + 1
        cores, gpus = sum(each.least_cores for each in needs), sum(each.gpus for each in needs)
        return Resources(1, cores, sum(each.memory_bytes for each in needs), gpus, tuple(sorted(units.items())))


def curve_of(name: str, needs: ToolNeeds) -> SpeedUp | None:
    """The curve of an elastic tool, if it is one; ConfigError for a curve that makes no sense."""
    if needs.elastic is None:
        return None
    return SpeedUp(needs.least_cores, needs.most_cores, needs.elastic, f"tool {name!r}")


def check_declared(
    tools: Mapping[str, ToolNeeds], quotas: Mapping[str, str], largest: tuple[str, Resources] | None
) -> None:
    """ConfigError for a senseless curve or quota, and a call that can never run.

    ``largest``: the largest tool worker, by name, once it is known.
    """
    for name, text in quotas.items():
        read_quota(name, text)
    for name, needs in tools.items():
        curve_of(name, needs)
        if needs.quota and needs.quota not in quotas:
            known = f"; known are {', '.join(sorted(quotas))}" if quotas else ""
            raise ConfigError(
                f"tool {name!r}: quota {needs.quota!r} is not configured{known}; type environment.quotas.{needs.quota}=10/s, "
                "with the rate that its API allows"
            )
        least = Resources(0, needs.least_cores, needs.memory_bytes, needs.gpus)
        if largest is not None and any(want > has for want, has in zip(least.local, largest[1].local, strict=True)):
            raise ConfigError(
                f"tool {name!r}: a call takes {described(least)}, and the largest tool worker, {largest[0]}, has "
                f"{described(largest[1])}, so no call can ever run; declare less, or give workers more with "
                "cluster.tool_supply"
            )
