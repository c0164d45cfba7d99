"""The event log of one run, as the scheduler writes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from libra.errors import StoreError
from libra.facts import Fact, Line, PolicySnapshot, to_json
from libra.observe.timeline.timeline import Timeline
from libra.policy import Admission, OneVersion, Ordering, Tail
from libra.store.event_log import EventLog

logger = logging.getLogger(__name__)

SNAPSHOT_EVENTS = 10_000
"""Events between two snapshots of the policy objects: a replay of the log's tail reads about as many."""
SNAPSHOT_BYTES_PER_EVENT = 12
"""A large snapshot is written less often: about this many bytes for each event since the last, whose line has 250."""

KEPT_SEGMENTS = 1024
"""States of each worker that are kept one by one, for the figures of the last minute; older ones are only counted."""
MOST_PENDING = 2000
"""Lines that are kept as objects at most, until someone looks or the sampler writes them."""


class RunLog:
    """Facts of a run with their times, and snapshots of its policy.

    A fact costs little when it happens: lines are encoded, and counted, in `flush`, or when someone looks at `timeline`.

    Parameters
    ----------
    run : str
    file : EventLog or None
        None: the run keeps no log, and only the newest fact is known.
    trainers : sequence of str
        Names of its training workers, for ``timeline``.

    Attributes
    ----------
    started_s : float
        Unix time of the run's start; lines count from it.
    """

    def __init__(self, run: str, file: EventLog | None, trainers: Sequence[str] = ()) -> None:
        self.started_s = time.time()
        self._timeline = Timeline(trainers, keep=KEPT_SEGMENTS)
        self._run, self._file = run, file
        self._closed: EventLog | None = None
        self._pending: list[Line] = []
        self._newest: Line | None = None
        self._num_lines = 0
        self._next_snapshot = 0

    @property
    def uptime_s(self) -> float:
        """Seconds since the run was registered."""
        return time.time() - self.started_s

    def emit(self, fact: Fact) -> None:
        """Append a fact; run and time are added."""
        self._newest = line = Line(self._run, round(time.time() - self.started_s, 6), fact)
        self._pending.append(line)
        if len(self._pending) >= MOST_PENDING:
            self._take_in()

    @property
    def timeline(self) -> Timeline:
        """Counts, curves and worker time since the run's start, as the lines of this log show them."""
        self._take_in()
        return self._timeline

    def _take_in(self) -> None:
        """Count what has happened since the last call, and write its lines."""
        pending, self._pending = self._pending, []
        lines = []
        for line in pending:
            self._timeline.add(line)
            if self._file is not None:
                try:
                    lines.append(to_json(line))
                except StoreError as error:  # one line's value ends neither the log nor the run
                    logger.error("run %s: a line of its event log is left out: %s", self._run, error)
        if self._file is not None:
            self._num_lines += len(lines)
            self._file.write_lines(lines)

    @property
    def snapshot_is_due(self) -> bool:
        """Whether enough has happened since the last snapshot."""
        return self._num_lines >= self._next_snapshot

    def emit_snapshot(
        self, policy: Ordering, admission: Admission, tail: Tail, family: str, one: OneVersion | None = None
    ) -> None:
        """Append a snapshot of the policy objects. Call it between facts, never between a fact and its commands.

        A resumed run and a replay of the newest part begin at a snapshot, so that a segment of the log does too.
        """
        if self._file is None:
            return
        self._take_in()
        self._file.rotate()
        versions = {} if one is None else one.snapshot()
        state = (policy.snapshot(), admission.snapshot(), tail.snapshot(), versions)
        snapshot = PolicySnapshot(policy.name, family, *state)
        line = to_json(Line(self._run, round(self.uptime_s, 6), snapshot))
        self._file.write_line(line)
        self._num_lines += 1
        self._next_snapshot = self._num_lines + max(SNAPSHOT_EVENTS, len(line) // SNAPSHOT_BYTES_PER_EVENT)

    def newest(self) -> str:
        """The newest fact and its age, in words."""
        if self._newest is None:
            return "none"
        _, t_s, fact = self._newest
        subjects = (getattr(fact, name) for name in ("key", "iteration", "address") if hasattr(fact, name))
        return f"{' '.join([fact.name, *map(str, subjects)])}, {self.uptime_s - t_s:.0f} s ago"

    def flush(self) -> None:
        """Pass everything logged so far to the operating system."""
        self._take_in()
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file; later facts are dropped, because they do not belong to this run.

        Its last lines become a segment if they are many; segments may still be compressed when this returns.
        """
        self._take_in()
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
