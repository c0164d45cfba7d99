"""The event log of one run, as the scheduler writes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from libra.events import Event, PolicySnapshot, to_json
from libra.observe.run_facts import RunFacts
from libra.policy import Admission, OneVersion, Ordering, Tail
from libra.scheduler.step_clock import StepClock
from libra.store.event_log import EventLog

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

SNAPSHOT_EVENTS = 10_000
"""Events between two snapshots of the policy objects: a replay of the log's tail reads about as many."""
SNAPSHOT_BYTES_PER_EVENT = 12
"""A large snapshot is written less often: about this many bytes for each event since the last, whose line has 250."""

KEPT_SEGMENTS = 1024
"""States of each worker that are kept one by one, for the figures of the last minute; older ones are only counted."""

P = ParamSpec("P")


def run_log(scheduler: Scheduler, run: str) -> RunLog:
    """The log of a run on this scheduler; one that drops its lines if the run is not registered."""
    libra: Any = scheduler.plugins.get("libra")
    state = libra.runs.get(run) if libra is not None else None
    return RunLog(run, None) if state is None else state.log


class RunLog:
    """Events of a run with their times, and snapshots of its policy.

    Parameters
    ----------
    run : str
    file : EventLog or None
        None: the run keeps no log, and only the newest event is known.
    trainers : sequence of str
        Names of its training workers, for ``facts``.

    Attributes
    ----------
    started_s : float
        Unix time of the run's start; events count from it.
    facts : RunFacts
        Counts, curves and worker time since the run's start, as the events of this log show them.
    clock : StepClock or None
        None: nobody measures steps.
    """

    def __init__(self, run: str, file: EventLog | None, trainers: Sequence[str] = ()) -> None:
        self.started_s = time.time()
        self.facts = RunFacts(trainers, keep=KEPT_SEGMENTS)
        self.clock: StepClock | None = None
        self._run, self._file = run, file
        self._closed: EventLog | None = None
        self._newest: Event | None = None
        self._num_events = 0
        self._next_snapshot = 0

    @property
    def uptime_s(self) -> float:
        """Seconds since the run was registered."""
        return time.time() - self.started_s

    def emit(self, kind: Callable[Concatenate[str, float, P], Event], *values: P.args, **fields: P.kwargs) -> None:
        """Append an event of `libra.events` with these fields; run and time are filled in."""
        self._newest = event = kind(self._run, round(time.time() - self.started_s, 6), *values, **fields)
        self.facts.add(event)
        if self.clock is not None:
            self.clock.add(event)
        if self._file is not None:
            self._num_events += 1
            self._file.write_line(to_json(event))

    @property
    def snapshot_is_due(self) -> bool:
        """Whether enough has happened since the last snapshot."""
        return self._num_events >= self._next_snapshot

    def emit_snapshot(
        self, policy: Ordering, admission: Admission, tail: Tail, family: str, one: OneVersion | None = None
    ) -> None:
        """Append a snapshot of the policy objects. Call it between events, never between an event and its commands.

        A resumed run and a replay of the newest part begin at a snapshot, so that a segment of the log does too.
        """
        if self._file is None:
            return
        self._file.rotate()
        versions = {} if one is None else one.snapshot()
        t_s, state = round(self.uptime_s, 6), (policy.snapshot(), admission.snapshot(), tail.snapshot(), versions)
        line = to_json(PolicySnapshot(self._run, t_s, policy.name, family, *state))
        self._file.write_line(line)
        self._num_events += 1
        self._next_snapshot = self._num_events + max(SNAPSHOT_EVENTS, len(line) // SNAPSHOT_BYTES_PER_EVENT)

    def newest(self) -> str:
        """The newest event and its age, in words."""
        event = self._newest
        if event is None:
            return "none"
        subjects = (getattr(event, name) for name in ("key", "iteration", "address") if hasattr(event, name))
        return f"{' '.join([event.name, *map(str, subjects)])}, {self.uptime_s - event.t_s:.0f} s ago"

    def flush(self) -> None:
        """Pass everything logged so far to the operating system."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file; later events are dropped, because they do not belong to this run.

        Its last lines become a segment if they are many; segments may still be compressed when this returns.
        """
        file, self._file = self._file, None
        if file is not None:
            file.rotate()
            file.close(wait=False)
            self._closed = file

    @property
    def compresses(self) -> bool:
        """Whether segments of the closed file are being compressed."""
        return self._closed is not None and self._closed.compresses

    def wait_compressed(self) -> None:
        """Return when they are; may take minutes for a log of gigabytes."""
        if self._closed is not None:
            self._closed.wait_compressed()
