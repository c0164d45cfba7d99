"""Quanta of a run, from its event log and store: seconds of engines, tools and everything between them.

A quantum is dispatched, sent to a worker, waits there for the end of a pass, is generated, decoded and recorded, and is
reported. The log has its beginning, its end and the worker's share; the store has the engine's. Held-out questions are left
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from libra import keys
from libra.types import Phase, StepSeconds

Array = NDArray[np.float64]


class Quantum(NamedTuple):
    """A generation or an action of the log.

    In seconds of the log, ``begun_s`` is its dispatch (NaN: it continued in the slot of the previous quantum) and ``told_s`` the
    report of its end; ``latency_s`` is wall time on the worker. ``inline`` names a tool that ran within a generation (empty: a
    malformed call; None: no tool).
    """

    key: keys.Key
    phase: str
    worker: str
    begun_s: float
    told_s: float
    latency_s: float
    tokens: int
    inline: str | None

    @property
    def place(self) -> tuple[int, ...]:
        """(iteration, group, sample)."""
        return self.key.indices


def quanta_of(events: Iterable[Mapping[str, Any]]) -> list[Quantum]:
    """Committed quanta of training trajectories, in log order."""
    given: dict[str, tuple[float, bool]] = {}
    found = []
    for event in events:
        name = event.get("name")
        if name in ("quantum_dispatched", "quantum_continued"):
            given[event["key"]] = event["t_s"], name == "quantum_dispatched"
        elif name == "quantum_finished":
            key = keys.parse(event["key"])
            begun_s, sent = given.get(event["key"], (0.0, False))
            if key is None or key.split != "train":
                continue
            inline = event["tool"] if event["phase"] == Phase.ROLLOUT and event["status"] else None
            found.append(
                Quantum(
                    key, event["phase"], event["worker"], begun_s if sent else float("nan"), event["t_s"],
                    event["latency_s"], event["tokens"], inline,
                )
            )  # fmt: skip
    return found


BINS = 16
"""Numbers that represent a distribution: each is the mean of equally many of its values."""


def binned(values: ArrayLike) -> tuple[float, ...]:
    """Up to `BINS` numbers to draw from, with the mean of ``values``; (0,) without values.

    Negative values count as 0: clocks of two processes differ by microseconds.
    """
    found = np.sort(np.maximum(np.asarray(values, float), 0.0))
    if not len(found):
        return (0.0,)
    # Interpolating the cumulative sum gives each bin equally many values, and keeps the mean.
    total = np.interp(np.linspace(0, len(found), BINS + 1), np.arange(len(found) + 1), np.r_[0.0, np.cumsum(found)])
    return tuple(round(float(value), 9) for value in np.diff(total) * BINS / len(found))


def transport_s(quanta: Sequence[Quantum]) -> tuple[float, ...]:
    """Seconds of the round trip between scheduler and worker, to draw from."""
    return binned([q.told_s - q.begun_s - q.latency_s for q in quanta if q.begun_s == q.begun_s])


class TurnsTaken(NamedTuple):
    """Generations of one engine, each array (n,): seconds of the report, on the worker, in the engine's queue, in its passes and in
    tools that ran within them; tokens generated, tokens of context, and the computed tokens among those.
    """

    told_s: Array
    latency_s: Array
    queued_s: Array
    busy_s: Array
    inline_s: Array
    tokens: Array
    context: Array
    computed: Array

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> TurnsTaken:
        """From rows of these numbers."""
        return cls(*np.asarray(rows, float).reshape(-1, 8).T)

    @property
    def waited_for_a_pass_s(self) -> Array:
        """Seconds in the queue until the end of a pass; a longer wait is for KV memory."""
        return np.minimum(self.queued_s, self.busy_s / np.maximum(self.tokens, 1.0))

    def worker_s(self) -> tuple[float, ...]:
        """Seconds on the worker outside passes, tools and waits for KV memory, to draw from."""
        others = self.latency_s - self.busy_s - self.inline_s - self.queued_s
        return binned(others + self.waited_for_a_pass_s)

    def wall_over_passes(self, steps: StepSeconds) -> float:
        """Wall seconds of these turns over those by passes of ``steps``, given the turns that ran beside them."""
        stop = self.told_s
        start = stop - self.busy_s
        beside = running_beside(start, stop)
        order = np.argsort(start)
        computed = np.concatenate([[0.0], np.cumsum(self.computed[order])])
        begun = start[order]
        # Every prefill during a turn delays it, its own included.
        held = computed[np.searchsorted(begun, stop, "right")] - computed[np.searchsorted(begun, start, "left")]
        context = self.context + 0.5 * self.tokens
        step_s = steps.fixed_s + beside * (steps.sequence_s + steps.context_token_s * context)
        explained = float((self.tokens * step_s + steps.prefill_token_s * held).sum())
        return float(self.busy_s.sum()) / explained if explained > 0.0 else 1.0


def running_beside(start_s: Array, stop_s: Array) -> Array:
    """(n,) mean number of intervals, itself included, that run while each does."""
    times = np.concatenate([start_s, stop_s])
    change = np.concatenate([np.ones(len(start_s)), -np.ones(len(stop_s))])
    order = np.argsort(times, kind="stable")
    at, running = times[order], np.cumsum(change[order])
    area = np.concatenate([[0.0], np.cumsum(np.diff(at) * running[:-1])])
    spent = np.interp(stop_s, at, area) - np.interp(start_s, at, area)
    return np.asarray(spent / np.maximum(stop_s - start_s, 1e-12))
