"""What a run's event log and store say of its quanta: how long engines, tools and everything between them took.

A quantum of a trajectory is dispatched, travels to a worker, waits there for a pass to end, is generated, becomes text and a
record, and is reported. The log has the beginning, the end and the worker's part of it; the store has the engine's. Everything
here is of training trajectories; questions that are held out are in no number.
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

    ``begun_s`` is when its slot was given (NaN: it went on in the slot of the one before), ``told_s`` when the scheduler heard
    of its end, in seconds of the log; ``latency_s`` is wall time on the worker. ``inline`` names a tool that ran within a
    generation (empty: a call that could not be read), None: none did.
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
    """Committed quanta of training trajectories, in the order of the log."""
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
"""Numbers that stand for a distribution: each is the mean of as many of its values."""


def binned(values: ArrayLike) -> tuple[float, ...]:
    """Up to `BINS` numbers to draw from, with the mean of ``values``; (0,) of none.

    What took less than nothing, for clocks of two processes differ by microseconds, took nothing.
    """
    found = np.sort(np.maximum(np.asarray(values, float), 0.0))
    if not len(found):
        return (0.0,)
    # As many in each, so that the mean stays: what is left over is spread by interpolation of the cumulative sum.
    total = np.interp(np.linspace(0, len(found), BINS + 1), np.arange(len(found) + 1), np.r_[0.0, np.cumsum(found)])
    return tuple(round(float(value), 9) for value in np.diff(total) * BINS / len(found))


def transport_s(quanta: Sequence[Quantum]) -> tuple[float, ...]:
    """Seconds from a slot's being given to the worker's beginning, and from its end to the scheduler's hearing, to draw from."""
    return binned([q.told_s - q.begun_s - q.latency_s for q in quanta if q.begun_s == q.begun_s])


class TurnsTaken(NamedTuple):
    """Generations of one engine, each array (n,): when it told of them, on the worker, in the engine's queue, in its passes, in
    tools that ran within them (seconds), tokens generated, tokens of context and of those what was computed.
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
        """Seconds in the queue as far as they were the rest of a pass: who waits longer waits for room."""
        return np.minimum(self.queued_s, self.busy_s / np.maximum(self.tokens, 1.0))

    def worker_s(self) -> tuple[float, ...]:
        """Seconds on the worker that are neither passes nor tools nor waiting for room in the engine, to draw from."""
        others = self.latency_s - self.busy_s - self.inline_s - self.queued_s
        return binned(others + self.waited_for_a_pass_s)

    def wall_over_passes(self, steps: StepSeconds) -> float:
        """Wall seconds of these turns over those that passes of ``steps`` explain, with those that ran beside them."""
        stop = self.told_s
        start = stop - self.busy_s
        beside = running_beside(start, stop)
        order = np.argsort(start)
        computed = np.concatenate([[0.0], np.cumsum(self.computed[order])])
        begun = start[order]
        # What is computed for anybody while a turn runs holds it up, its own context included.
        held = computed[np.searchsorted(begun, stop, "right")] - computed[np.searchsorted(begun, start, "left")]
        context = self.context + 0.5 * self.tokens
        step_s = steps.fixed_s + beside * (steps.sequence_s + steps.context_token_s * context)
        explained = float((self.tokens * step_s + steps.prefill_token_s * held).sum())
        return float(self.busy_s.sum()) / explained if explained > 0.0 else 1.0


def running_beside(start_s: Array, stop_s: Array) -> Array:
    """(n,) how many intervals, itself included, run on average while each does."""
    times = np.concatenate([start_s, stop_s])
    change = np.concatenate([np.ones(len(start_s)), -np.ones(len(stop_s))])
    order = np.argsort(times, kind="stable")
    at, running = times[order], np.cumsum(change[order])
    area = np.concatenate([[0.0], np.cumsum(np.diff(at) * running[:-1])])
    spent = np.interp(stop_s, at, area) - np.interp(start_s, at, area)
    return np.asarray(spent / np.maximum(stop_s - start_s, 1e-12))
