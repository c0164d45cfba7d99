"""What the scheduler sees of tool workers, for `libra.policy.tool_fleet`.

Who started the workers (`libra.cluster.elastic_tools`) looks here, and starts or ends some as is ordered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from libra.facts import ToolWorkersOrdered
from libra.policy.tool_fleet import ToolFleet, ordered
from libra.scheduler.run_state import RunState
from libra.scheduler.worker_registry import Workers
from libra.types import Phase

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from libra.policy import Dispatcher

logger = logging.getLogger(__name__)

ROLE = "tool-"
"""How names of tool workers begin."""
NEWEST = 0.1
"""Weight of the newest action in their mean seconds."""


class ToolWorkers:
    """One per scheduler; ``runs`` is the plugin's own."""

    def __init__(
        self, scheduler: Scheduler, dispatcher: Dispatcher, workers: Workers, runs: dict[str, RunState]
    ) -> None:
        self._scheduler, self._dispatcher, self._workers, self._runs = scheduler, dispatcher, workers, runs
        self._fleet: ToolFleet | None = None
        self._action_s = 1.0

    def acted(self, seconds: float) -> None:
        """An action took so long."""
        self._action_s += NEWEST * (seconds - self._action_s)

    def look(self, least: int, most: int) -> ToolWorkersOrdered | None:
        """What is to change now, which whoever calls this carries out; None: nothing."""
        fleet = self._fleet
        if fleet is None or (fleet.least, fleet.most) != (least, most):
            fleet = self._fleet = ToolFleet(least, most)
        at_s = round(time.monotonic(), 6)
        present = {name: address for name, address in self._workers.address.items() if name.startswith(ROLE)}
        units, waiting, waiting_s = self._load(present)
        seen = fleet.facts(
            at_s,
            present=frozenset(present),
            idle=frozenset(name for name, address in present.items() if self._may_go(name, address, least)),
            units=units,
            waiting=waiting,
            waiting_s=waiting_s,
        )
        order = ordered(seen)
        if order is None:
            return None
        fleet.follow(order, at_s)
        logger.info("%s: %d tool workers", order.reason, order.ordered)
        for state in self._runs.values():
            state.log.emit(order)
        return order

    def _load(self, present: Iterable[str]) -> tuple[int, int, float]:
        """Units of the present workers together, actions that wait for some, and unit-seconds of these."""
        leases = self._dispatcher.leases
        if leases is None:
            slots = sum(self._workers.known[name].tool_slots for name in present)
            waiting = self._dispatcher.num_waiting(Phase.TOOL)
            return slots, waiting, waiting * self._action_s
        capacity = leases.table.capacity()
        cores = sum(capacity[name].cores for name in present if name in capacity)
        return cores, *leases.table.waiting_work()

    def _may_go(self, name: str, address: str, least: int) -> bool:
        number = name.removeprefix(ROLE)
        if not number.isdigit() or int(number) < least:
            return False
        ws = self._scheduler.workers.get(address)
        return ws is not None and not ws.processing and not self._dispatcher.running_on(name, Phase.TOOL)
