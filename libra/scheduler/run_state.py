"""What the plugin knows of one run and of each trajectory in it."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libra.events import SCHEMA
from libra.keys import Key
from libra.policy import Admission, Fifo
from libra.store.event_log import EventLog
from libra.types import Phase

HISTORY_ROWS = 1200
"""Rows kept for the dashboard's plots: ten minutes at two a second."""


@dataclass(slots=True)
class Tracked:
    """A trajectory key the plugin has seen parked."""

    key: str
    parsed: Key
    run: RunState
    phase: Phase = Phase.ROLLOUT
    quanta: int = 0
    reported: bool = False  # whether the quantum now running has reported
    lost: int = 0  # quanta in a row that ended without a report
    ended: bool = False
    at: tuple[Phase, str] | None = None
    home: dict[Phase, str] = field(default_factory=dict)


@dataclass(slots=True)
class RunState:
    """Everything of one run that lives in the scheduler; made anew by ``libra_register_run``."""

    run: str
    epoch: int
    directory: Path
    eta: int
    iterations: int
    admission: Admission
    policy: Fifo
    log: EventLog | None
    started_s: float = field(default_factory=time.time)
    iteration: int = -1
    gates: dict[int, str] = field(default_factory=dict)
    eval_gates: dict[int, list[str]] = field(default_factory=dict)
    batches: dict[int, str] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)  # address of each worker that has served a version, by name
    quanta: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    groups: int = 0
    rewards: list[tuple[int, float]] = field(default_factory=list)
    lags: list[tuple[int, float]] = field(default_factory=list)
    history: deque[tuple[float, int, int, int, int, int]] = field(default_factory=lambda: deque(maxlen=HISTORY_ROWS))

    @property
    def uptime_s(self) -> float:
        """Seconds since the run was registered."""
        return time.time() - self.started_s

    def emit(self, name: str, **fields: Any) -> None:
        """Append one event of `libra.events` to the run's event log, where it keeps one. A dict, because this is the hot path."""
        if self.log is not None:
            t_s = round(time.time() - self.started_s, 6)
            self.log.write({"schema": SCHEMA, "name": name, "run": self.run, "t_s": t_s, **fields})
