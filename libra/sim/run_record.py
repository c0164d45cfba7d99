"""One run directory, read once: configuration, event log, metrics, training turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from libra import keys
from libra.config import RunConfig, load_config
from libra.errors import RunDirectoryError
from libra.facts import (
    EngineDeclared,
    Fact,
    GateParked,
    GroupCommitted,
    GroupScored,
    HomeChanged,
    Line,
    OpenBatch,
    OpenGate,
    QuantumContinued,
    QuantumDispatched,
    QuantumFinished,
    RunStarted,
    StepFinished,
    TrajectoryEnded,
    TrajectoryParked,
    VersionPublished,
    VersionServed,
    WorkerCapacity,
    WorkerWithdrawn,
    from_dict,
    name_of,
)
from libra.observe.metrics import read_metrics
from libra.sim.simulation_options import Announced
from libra.store.event_log import read_events
from libra.types import Phase

F = TypeVar("F", bound=Fact)
Place = tuple[int, ...]
"""(iteration, group, sample) of a training trajectory."""
READ = {
    name_of(kind)
    for kind in (
        EngineDeclared, GateParked, GroupCommitted, GroupScored, HomeChanged, OpenBatch, OpenGate, QuantumContinued,
        QuantumDispatched, QuantumFinished, RunStarted, StepFinished, TrajectoryEnded, TrajectoryParked, VersionPublished,
        VersionServed, WorkerCapacity, WorkerWithdrawn,
    )
}  # fmt: skip
"""Names of the facts that a simulation reads from a log."""


class Quantum(NamedTuple):
    """A committed generation or action of a training trajectory, in log seconds."""

    place: Place
    phase: Phase
    worker: str
    begun_s: float  # dispatch, or start in the slot of the previous quantum
    reported_s: float
    dispatched: bool
    latency_s: float  # on the worker
    tokens: int
    inline: str | None  # tool within a generation; empty: malformed call

    @property
    def transport_s(self) -> float:
        """Round-trip seconds between scheduler and worker."""
        return self.reported_s - self.begun_s - self.latency_s


class RealisedRun(NamedTuple):
    """Measured times of a run, for comparison with its simulation.

    ``rollout_s``: seconds of each iteration from gate to last trajectory. ``makespan_s``: first
    gate to last trajectory, less the driver's delays in submitting iterations (held-out questions).
    """

    makespan_s: float
    rollout_s: tuple[float, ...]
    moves: int


def place_of(key: str) -> Place | None:
    """Place of a training trajectory; None for any other ``key``."""
    parsed = keys.parse(key)
    return parsed.indices if parsed is not None and parsed.split == "train" else None


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run directory; ``lines`` are of its last start that generated anything."""

    directory: Path
    config: RunConfig
    lines: tuple[Line, ...]
    metrics: tuple[Mapping[str, Any], ...]
    starts: int

    @classmethod
    def read(cls, directory: Path) -> RunRecord:
        """Read a run; RunDirectoryError without an event log, StoreError for a foreign line."""
        for name, what in (("config.resolved.yaml", "a run"), ("events.jsonl", "a run with an event log")):
            if not (directory / name).is_file():
                raise RunDirectoryError(f"{directory}: holds no {name}; name the directory of {what}")
        lines = [from_dict(each) for each in read_events(directory / "events.jsonl").events if each.get("name") in READ]
        begun = [index for index, line in enumerate(lines) if type(line.fact) is RunStarted] or [0]
        starts = [lines[first:end] for first, end in pairwise((*begun, len(lines)))]
        busy = [start for start in starts if any(type(line.fact) is QuantumFinished for line in start)]
        metrics = read_metrics(directory) if (directory / "metrics.jsonl").is_file() else []
        config = load_config(directory / "config.resolved.yaml")
        return cls(directory, config, tuple((busy or starts)[-1]), tuple(metrics), max(1, len(busy)))

    @cached_property
    def _by_kind(self) -> dict[type[Fact], list[tuple[float, Fact]]]:
        found: dict[type[Fact], list[tuple[float, Fact]]] = {}
        for _, t_s, fact in self.lines:
            found.setdefault(type(fact), []).append((t_s, fact))
        return found

    def of(self, kind: type[F]) -> list[tuple[float, F]]:
        """Facts of one kind with their seconds, in order."""
        return self._by_kind.get(kind, [])  # type: ignore[return-value]

    @cached_property
    def quanta(self) -> list[Quantum]:
        """Committed quanta of training trajectories, in log order."""
        begun: dict[str, tuple[float, bool]] = {}
        found = []
        for _, t_s, fact in self.lines:
            if isinstance(fact, QuantumDispatched | QuantumContinued):
                begun[fact.key] = t_s, type(fact) is QuantumDispatched
            elif type(fact) is QuantumFinished and (place := place_of(fact.key)) is not None:
                begun_s, dispatched = begun.get(fact.key, (t_s, False))
                inline = fact.tool if fact.phase is Phase.ROLLOUT and fact.status else None
                timed = (begun_s, t_s, dispatched, fact.latency_s)
                found.append(Quantum(place, fact.phase, fact.worker, *timed, fact.tokens, inline))
        return found

    @cached_property
    def capacities(self) -> dict[str, list[WorkerCapacity]]:
        """Facts about each worker that the policy received, in order."""
        found: dict[str, list[WorkerCapacity]] = {}
        for _, fact in self.of(WorkerCapacity):
            found.setdefault(fact.worker, []).append(fact)
        return found

    @property
    def tool_slots(self) -> int:
        """Concurrent actions over all workers."""
        return sum(declared[-1].tool_slots for declared in self.capacities.values())

    @property
    def inline_tools(self) -> frozenset[str]:
        """Tools that ran within generations."""
        return frozenset(quantum.inline for quantum in self.quanta if quantum.inline is not None)

    @property
    def family(self) -> str:
        """Environment of the trajectories: the policy's family."""
        return next((fact.family for _, fact in self.of(RunStarted)), "")

    def gates_s(self) -> dict[int, float]:
        """Seconds at which each iteration's gate opened."""
        return {fact.iteration: t_s for t_s, fact in self.of(OpenGate)}

    def ends_s(self) -> dict[Place, float]:
        """Seconds at which each training trajectory ended."""
        parsed = ((place_of(fact.key), t_s) for t_s, fact in self.of(TrajectoryEnded))
        return {place: t_s for place, t_s in parsed if place is not None}

    def arrivals_s(self) -> dict[Place, float]:
        """First parking times of training trajectories, in the order that breaks policy ties."""
        found: dict[Place, float] = {}
        for t_s, fact in self.of(TrajectoryParked):
            if (place := place_of(fact.key)) is not None:
                found.setdefault(place, t_s)
        return found

    def committed_s(self) -> dict[Place, float]:
        """Seconds at which each training group, (iteration, group), was committed."""
        return {(fact.iteration, fact.group): t_s for t_s, fact in self.of(GroupCommitted) if fact.split == "train"}

    def published_s(self) -> dict[int, float]:
        """Seconds at which each version was published."""
        return {fact.version: t_s for t_s, fact in self.of(VersionPublished)}

    def steps_s(self) -> tuple[float, ...]:
        """Seconds of each batch, from its last group or awaited score to publication or step end.

        A streamed batch starts with its last wave, since its last group may be complete earlier.
        """
        over = {version - 1: t_s for version, t_s in self.published_s().items()} | self._ended_s()
        committed, scored, found = self.committed_s(), self.scores(), list[float]()
        for opened_s, opened in sorted(self.of(OpenBatch), key=lambda each: each[1].batch):
            if opened.batch not in over or opened.batch != len(found):
                break
            complete = [committed.get(member, opened_s) for member in opened.members] or [opened_s]
            begins_s = min(opened_s, max([over.get(opened.batch - 1, 0.0), *complete]))
            waits = (scored.get(member, (0.0, 0.0))[0] for member in opened.members)
            found.append(over[opened.batch] - max(begins_s, *waits, 0.0))
        return tuple(found)

    def scores(self) -> dict[Place, tuple[float, float]]:
        """By (iteration, group): end and seconds of each teacher score that a batch awaits."""
        if not self.config.distil.wait_s:
            return {}
        return {(fact.iteration, fact.group): (t_s, fact.score_s) for t_s, fact in self.of(GroupScored)}

    def publish_s(self) -> float:
        """Mean seconds of publications that overlapped the next step; 0 without any."""
        published = self.published_s()
        return mean_s([published[step + 1] - t_s for step, t_s in self._ended_s().items() if step + 1 in published])

    def _ended_s(self) -> dict[int, float]:
        if not self.config.run.eta:
            return {}
        return {fact.step: t_s for t_s, fact in self.of(StepFinished) if fact.beside}

    def realised(self, iterations: int) -> RealisedRun | None:
        """Measured times of the first iterations; None if the run was resumed, or finished fewer."""
        gates, ends = self.gates_s(), self.ends_s()
        last = {k: max((t_s for place, t_s in ends.items() if place[0] == k), default=None) for k in range(iterations)}
        if self.starts > 1 or any(k not in gates or last[k] is None for k in range(iterations)):
            return None
        published = self.published_s()
        asked = {fact.iteration: t_s for t_s, fact in self.of(GateParked)}
        eta, paused = self.config.run.eta, 0.0
        for k in range(1, iterations):
            ready = max(published.get(k - eta, 0.0), gates[0])
            paused += max(0.0, asked.get(k, ready) - ready)
        rollout = tuple(float(last[k] or 0.0) - gates[k] for k in range(iterations))
        whole = max(float(end or 0.0) for end in last.values()) - gates[0]
        return RealisedRun(whole - paused, rollout, self._moves(iterations))

    def _moves(self, iterations: int) -> int:
        workers: dict[Place, list[str]] = {}
        for quantum in self.quanta:
            if quantum.phase == Phase.ROLLOUT and quantum.place[0] < iterations:
                workers.setdefault(quantum.place, []).append(quantum.worker)
        return sum(one != other for each in workers.values() for one, other in pairwise(each))

    def announced(self, worker: str) -> tuple[Announced, ...]:
        """Facts about an engine, absences included, as the policy received them.

        Facts before the first gate become the last of them; each later fact has the iteration that
        started last.
        """
        gates = sorted((t_s, iteration) for iteration, t_s in self.gates_s().items())
        first_s = gates[0][0] if gates else 0.0
        before, later = tuple[Announced, ...](), list[Announced]()
        for _, t_s, fact in self.lines:
            if not isinstance(fact, WorkerCapacity | WorkerWithdrawn) or fact.worker != worker:
                continue
            if isinstance(fact, WorkerCapacity) and not fact.rollout_slots:
                continue
            if t_s <= first_s:
                before = (Announced(0, 0.0, fact),)
            else:
                gate_s, iteration = max(gate for gate in gates if gate[0] <= t_s)
                later.append(Announced(iteration, t_s - gate_s, fact))
        return (*before, *later)


def mean_s(values: Sequence[float]) -> float:
    """Mean of ``values``; 0 if empty."""
    return float(np.mean(values)) if values else 0.0
