"""Every quantum of every trajectory as a row in Dask's task stream.

Dask records a row when a key leaves ``processing`` for ``memory`` or ``erred``; since a trajectory
is one key that runs many times, Dask's stream alone has only its last quantum.

1. Every quantum given to `QuantumStream.add` is one row of the buffer behind ``/status`` and
   ``Client.get_task_stream``; the buffer keeps its own bound.
2. A key with added quanta gets no second row in ``memory``; if it errs, Dask's own row stays.
3. Rows in one lane of one worker never overlap; a lane is a line of the plot, not a thread.
4. State per key ends when the scheduler forgets the key, state per worker when the worker leaves.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from distributed.diagnostics import task_stream as dask_task_stream
from distributed.diagnostics.plugin import SchedulerPlugin

from libra.types import Phase

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.diagnostics.task_stream import TaskStreamPlugin

logger = logging.getLogger(__name__)

PHASE_COLORS: Final = {Phase.ROLLOUT: "#3566a8", Phase.TOOL: "#e08214"}
"""Colour of each phase, here and on the Libra page."""

_PHASE_FIELD: Final = "libra_phase"


def _color_of_row(row: dict[str, Any]) -> str:
    phase = (row.get("metadata") or {}).get(_PHASE_FIELD)
    return PHASE_COLORS[Phase(phase)] if phase else str(dask_task_stream.color_of_message(row))


class QuantumStream(SchedulerPlugin):
    """Scheduler plugin ``libra-task-stream``: adds quantum rows to Dask's ``TaskStreamPlugin``.

    A second instance replaces the first and takes over its state. ``refused`` counts quanta without
    a row because a clock set back made them stop before they started.
    """

    name = "libra-task-stream"

    def __init__(self, scheduler: Scheduler) -> None:
        self.refused = 0
        self._scheduler = scheduler
        self._num_quanta: dict[Any, int] = {}  # key -> rows added
        self._lanes: dict[tuple[str, Phase], list[float]] = {}  # (worker, phase) -> last stop of each lane
        previous = scheduler.plugins.pop(self.name, None)
        if isinstance(previous, QuantumStream):
            self.refused, self._num_quanta, self._lanes = previous.refused, previous._num_quanta, previous._lanes
        dask_task_stream.colors["compute"] = _color_of_row
        self._stock()
        scheduler.add_plugin(self, name=self.name)

    def add(self, key: Any, worker_address: str, phase: Phase | str, start_s: float, stop_s: float, label: str) -> None:
        """Append a finished quantum, from ``start_s`` to ``stop_s`` in Unix seconds.

        The row's key is ``(label, key, n)``, n from 0, so that Dask groups rows by label. ``label``
        is ``generate`` or the tool's name; if empty (a malformed call), the phase is used.
        """
        if type(phase) is not Phase:
            phase = Phase(phase)
        if stop_s < start_s:
            self.refused += 1
            logger.warning(
                "task stream: quantum of %s on %s not shown: its stop %.6f s is before its start %.6f s; "
                "compare the worker's clock with the scheduler's (%d refused so far)",
                key, worker_address, stop_s, start_s, self.refused,
            )  # fmt: skip
            return
        number = self._num_quanta.get(key, 0)
        self._num_quanta[key] = number + 1
        stock = self._stock()
        stock.buffer.append(
            {
                "key": (label or str(phase), key, number), "worker": worker_address, "status": "OK",
                "thread": f"{phase}-{self._lane(worker_address, phase, start_s, stop_s)}",
                "startstops": [{"action": "compute", "start": start_s, "stop": stop_s}],
                "nbytes": 0, "type": b"", "typename": "", "metadata": {_PHASE_FIELD: str(phase)},
            }
        )  # fmt: skip
        stock.index += 1

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Remove Dask's row for a key's last quantum; drop state of forgotten keys."""
        if key not in self._num_quanta:
            return
        if start == "processing" and finish == "memory":
            stock = self._stock()
            if stock.buffer and stock.buffer[-1]["key"] == key:
                stock.buffer.pop()
                stock.index -= 1
        elif finish == "forgotten":
            del self._num_quanta[key]

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Free the lanes of a departed worker."""
        for phase in Phase:
            self._lanes.pop((worker, phase), None)

    def _lane(self, worker: str, phase: Phase, start_s: float, stop_s: float) -> int:
        lanes = self._lanes.setdefault((worker, phase), [])
        lane = next((lane for lane, free_from_s in enumerate(lanes) if free_from_s <= start_s), len(lanes))
        lanes[lane : lane + 1] = [stop_s]
        return lane

    def _stock(self) -> TaskStreamPlugin:
        """Dask's plugin, registered before ours, so that it sees each transition first."""
        plugins = self._scheduler.plugins
        if dask_task_stream.TaskStreamPlugin.name not in plugins:
            self._scheduler.add_plugin(dask_task_stream.TaskStreamPlugin(self._scheduler))
            if plugins.pop(self.name, None) is not None:
                self._scheduler.add_plugin(self, name=self.name)
        return plugins[dask_task_stream.TaskStreamPlugin.name]  # type: ignore[return-value]
