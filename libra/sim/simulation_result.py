"""The result of a simulation: times, tokens, moves, and every dispatch in order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from libra.hardware.virtual_engine import Counters
from libra.sim.workload import Workload
from libra.types import Phase


class Dispatched(NamedTuple):
    """One dispatch: a slot given to a trajectory."""

    at_s: float
    phase: Phase
    key: str
    quantum: int
    worker: str
    reason: str


@dataclass(slots=True)
class SimulationRecord:
    """What a simulation keeps for its result: dispatches, and when gates opened and trajectories, groups, iterations ended."""

    dispatched: list[Dispatched] = field(default_factory=list)
    ended_s: dict[str, float] = field(default_factory=dict)
    group_s: dict[tuple[int, int], float] = field(default_factory=dict)
    rollout_s: dict[int, float] = field(default_factory=dict)  # when the last trajectory of an iteration ended
    iteration_s: dict[int, float] = field(default_factory=dict)
    gate_s: dict[int, float] = field(default_factory=dict)
    moves: int = 0
    lost_quanta: int = 0


class SimulationResult(NamedTuple):
    """Result of one simulation.

    Attributes
    ----------
    makespan_s : float
        From the first gate to the end of the last trajectory.
    group_completion_s : float
        Mean over groups of the time from its iteration's gate to its last trajectory's end.
    iteration_s : tuple of float
        Seconds of each iteration, gate to end of training.
    rollout_s : tuple of float
        Seconds of each iteration, gate to the end of its last trajectory.
    generated_tokens, prefilled_tokens, cached_tokens, recomputed_tokens : int
        Sampled; context computed; context whose KV was cached; computed context that some engine had computed before.
    moves, lost_quanta : int
        Turns that began on another engine than the previous turn; quanta that were lost with their engine.
    preempted, fetched_tokens : int
        Requests that were preempted; KV that was fetched from host memory.
    busy_frac : float
        Share of the engines' seconds in which they were busy, up to the last trajectory's end.
    dispatched : tuple of Dispatched
        In order.
    """

    makespan_s: float
    group_completion_s: float
    iteration_s: tuple[float, ...]
    rollout_s: tuple[float, ...]
    trajectories: int
    turns: int
    generated_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    moves: int
    lost_quanta: int
    busy_frac: float
    peak_kv_tokens: dict[str, int]
    dispatched: tuple[Dispatched, ...]
    preempted: int = 0
    fetched_tokens: int = 0

    @classmethod
    def of(
        cls,
        workload: Workload,
        record: SimulationRecord,
        counters: Sequence[tuple[str, Counters]],
        engines: int,
        end_s: float,
        fetched_tokens: int = 0,
    ) -> SimulationResult:
        """The result of a record; an engine that stopped and came back has counters of each time."""
        makespan = max(record.ended_s.values())
        groups = [at - record.gate_s[iteration] for (iteration, _), at in record.group_s.items()]
        iterations = [record.iteration_s[k] - record.gate_s[k] for k in sorted(record.iteration_s)]
        done = [each for _, each in counters]
        peaks: dict[str, int] = {}
        for name, each in counters:
            peaks[name] = max(peaks.get(name, 0), each.peak_kv_tokens)
        return cls(
            makespan,
            sum(groups) / len(groups),
            tuple(iterations),
            tuple(record.rollout_s[k] - record.gate_s[k] for k in sorted(record.rollout_s)),
            len(record.ended_s),
            workload.num_turns,
            sum(c.generated_tokens for c in done),
            sum(c.prefilled_tokens for c in done),
            sum(c.cached_tokens for c in done),
            sum(c.recomputed_tokens for c in done),
            record.moves,
            record.lost_quanta,
            sum(c.busy_s for c in done) / (max(end_s, makespan) * engines) if engines and makespan else 0.0,
            peaks,
            tuple(record.dispatched),
            sum(c.preempted for c in done),
            fetched_tokens,
        )

    def digest(self) -> str:
        """Hash of every dispatch with its time and place: equal for equal simulations."""
        text = "\n".join(f"{d.at_s!r} {d.phase} {d.key} {d.quantum} {d.worker}" for d in self.dispatched)
        return hashlib.sha256(text.encode()).hexdigest()

    def row(self) -> dict[str, Any]:
        """The figures as JSON-able values, without the list of dispatches."""
        values = self._asdict()
        del values["dispatched"], values["peak_kv_tokens"]
        return {
            **values,
            "iteration_s": list(self.iteration_s),
            "rollout_s": list(self.rollout_s),
            "tokens_per_s": self.generated_tokens / self.makespan_s if self.makespan_s else 0.0,
            "digest": self.digest(),
        }
