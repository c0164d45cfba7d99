"""The state of each worker over time, and the cause of idle time.

Busy: ``generating`` (a trajectory holds a ROLLOUT slot, including tools within a generation),
``acting`` (a TOOL slot), ``training`` (an optimizer step or a wave), ``turned`` (a wave, on an
engine that switched roles), ``moving`` (publishing, loading or checking weights). Idle: `IDLE`.
Work for another run counts as idle.

1. A worker has one state at each moment between its first and last event, except while away.
2. A trajectory has a slot of at most one worker; used slots are never negative.
3. Folding old segments (``keep``) changes no worker's total.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from libra import facts
from libra.facts import Fact
from libra.observe.timeline.states import AWAY, STATES, Kind, Places, RunTime, Slot, WorkerClock, WorkerTime
from libra.types import Phase

_NOT_TRAINING: Final = frozenset(STATES) - {"training"}
_NOT_IN_WAVES: Final = frozenset(STATES) - {"turned", "wave"}
_NOT_WAITING: Final = frozenset({"starting", "lost", "training", "role", "turning", "returning"})
_NOT_LOADING: Final = frozenset({"starting", "role", "lent", "training", "turning", "returning"})


class WorkerTimes:
    """States of all workers of a run, and ``places`` of its trajectories.

    ``trainers`` names training workers that the log does not: a single one forms no group. ``keep``
    is the number of segments kept per worker, older ones being only counted; None keeps all.
    ``now_s`` is the newest fact's time over all starts, without pauses between starts.
    """

    def __init__(self, places: Places, trainers: Sequence[str] = (), *, keep: int | None = None) -> None:
        self.now_s = 0.0
        self._places, self._trainers, self._keep = places, tuple(trainers), keep
        self._clocks: dict[str, WorkerClock] = {}
        self._begin()

    def _begin(self) -> None:
        for clock in self._clocks.values():
            clock.enter(self.now_s, AWAY)
            clock.count_slots(self.now_s)
            clock.running = clock.acting = 0
            clock.away, clock.served, clock.quarantined, clock.lent = True, False, False, False
            clock.changing, clock.hybrid, clock.ready_s = "", False, math.inf
        self._places.clear()
        self._gates: set[int] = set()
        self._batches_parked: set[int] = set()
        self._batches_opened: set[int] = set()
        self._waves_opened: dict[tuple[int, int], float] = {}  # (batch, wave) in training: start
        self._switches: dict[str, str] = {}  # by worker, the role of its newest switch
        self._changes: dict[int, tuple[str, ...]] = {}  # by generation, workers that change roles
        self._published, self._stepped = -1, -1
        self._prepared_s = 0.0  # since when the batch in training was ready
        self._group_lost = False
        self._has_ended = False  # whether a trajectory has ended since the newest gate
        self._causes: tuple[Any, ...] = ()
        self._moment: tuple[bool, ...] = ()

    # ---------------------------------------------------------------- reading

    def times(self, until_s: float | None = None, since_s: float = 0.0) -> RunTime:
        """Totals up to ``until_s`` or the newest fact; folded segments count if ``since_s`` is 0."""
        end_s = max(self.now_s, until_s or 0.0)
        found = []
        for name, clock in sorted(self._clocks.items()):
            seconds, gpu_s = clock.totals(since_s, end_s)
            found.append(WorkerTime(name, clock.kind, dict(seconds), dict(gpu_s), clock.slots_used_frac(end_s)))
        return RunTime(tuple(found), since_s, end_s)

    def states(self) -> dict[str, str]:
        """Present state of each present worker."""
        now = {name: clock.segments[-1].state for name, clock in sorted(self._clocks.items()) if clock.segments}
        return {name: state for name, state in now.items() if state != AWAY}

    def training_state(self) -> tuple[str, float]:
        """State of the first present training worker, and its start; ``AWAY`` without a worker."""
        trainers = (clock.segments[-1] for clock in self._clocks.values() if clock.kind == "trainer" and clock.segments)
        return next(((last.state, last.start_s) for last in trainers if last.state != AWAY), (AWAY, 0.0))

    def training_split(self, since_s: float, until_s: float) -> dict[str, float]:
        """Seconds by state between two times, of the training worker present the longest."""
        trainers = [clock for clock in self._clocks.values() if clock.kind == "trainer" and not clock.hybrid]
        found: list[dict[str, float]] = [{**clock.totals(max(since_s, 1e-9), until_s)[0]} for clock in trainers]
        return max(found, key=lambda seconds: sum(seconds.values()), default={})

    def segments(self) -> dict[str, list[tuple[float, float, str]]]:
        """(start, stop, state) of each worker's kept segments without absences, in the time of `now_s`."""
        found: dict[str, list[tuple[float, float, str]]] = {}
        for name, clock in sorted(self._clocks.items()):
            stops = [*(each.start_s for each in clock.segments[1:]), self.now_s]
            spans = zip(clock.segments, stops, strict=True)
            found[name] = [(s.start_s, stop, s.state) for s, stop in spans if s.state != AWAY and stop > s.start_s]
        return found

    # ---------------------------------------------------------------- facts

    def take(self, fact: Fact) -> None:
        """Process a fact at `now_s`."""
        handler = OF_TRAJECTORIES.get(type(fact))
        if handler is None:
            for take in (self._training, self._engine, self._membership, self._roles):
                take(fact)
        else:
            handler(self, fact)
            places = self._places
            (rollout, tool), used = places.levels.values(), places.used
            moment = (
                not rollout, not tool, not places.open, not used[Phase.ROLLOUT], not used[Phase.TOOL], self._has_ended,
            )  # fmt: skip
            if moment == self._moment:
                return  # idle workers have no other cause
            self._moment = moment
        self._update_all()

    def started(self) -> None:
        """Start the run."""
        self._begin()
        for name in self._trainers:
            self._clock(name, "trainer")

    def _clock(self, name: str, kind: Kind) -> WorkerClock:
        clock = self._clocks.get(name)
        if clock is None:
            clock = self._clocks[name] = WorkerClock(kind, slot_at_s=self.now_s)
        elif clock.away:
            clock.count_slots(self.now_s)
            clock.away = False
        if kind == "engine" and clock.kind == "tools":
            clock.kind = "engine"
        self._update(clock)
        return clock

    def _update(self, clock: WorkerClock) -> None:
        clock.enter(self.now_s, self._state(clock))
        if self._keep is not None and len(clock.segments) > 2 * self._keep:
            clock.fold(self._keep)

    def _update_all(self) -> None:
        causes = (self._engine_idle(), self._trainer_state(), self._tool_idle(), self._newest_wave_s)
        if causes != self._causes:
            self._causes = causes
            for clock in self._clocks.values():
                self._update(clock)

    # ---------------------------------------------------------------- states

    def _state(self, clock: WorkerClock) -> str:
        if clock.away:
            return AWAY
        if clock.kind == "trainer":
            if clock.changing or not clock.hybrid:
                return clock.changing or self._trainer_state()
            return "turned" if self._newest_wave_s >= clock.ready_s else "wave"
        if clock.running:
            return "generating"
        if clock.acting:
            return "acting"
        if clock.lent:
            return "lent"
        if clock.kind == "tools":
            return self._tool_idle()
        if clock.changing or clock.quarantined:
            return clock.changing or "quarantined"
        return self._engine_idle() if clock.served else "starting"

    def _engine_idle(self) -> str:
        places = self._places
        if places.levels[Phase.ROLLOUT]:
            return "dispatch"
        if places.open:
            if places.used[Phase.ROLLOUT]:
                return "tail"
            return "tools" if places.used[Phase.TOOL] or places.levels[Phase.TOOL] else "dispatch"
        if self._batches_parked and not self._trains and not self._gates:
            return "grading" if self._has_ended else "dispatch"
        return "version" if self._gates or self._trains else "nothing"

    @property
    def _trains(self) -> bool:
        return bool(self._batches_opened) or self._stepped >= self._published

    def _trainer_state(self) -> str:
        if self._published < 0:
            return "starting"
        if self._group_lost:
            return "lost"
        if self._batches_opened or self._waves_opened:  # the previous version may still be publishing
            return "training"
        if self._stepped >= self._published:
            return "moving"
        if self._batches_parked:
            return "trajectories" if self._places.open or not self._has_ended else "grading"
        return "evaluation" if self._places.open else "nothing"

    @property
    def _newest_wave_s(self) -> float:
        return max(self._waves_opened.values()) if self._waves_opened else -1.0

    def _tool_idle(self) -> str:
        if self._published < 0:
            return "starting"
        return "dispatch" if self._places.levels[Phase.TOOL] else "no_calls"

    # ---------------------------------------------------------------- trajectories

    def _parked(self, fact: facts.TrajectoryParked) -> None:
        self._stopped(fact)
        self._places.waits(fact.key, (Phase(fact.phase), 0))

    def _started(self, fact: facts.QuantumDispatched | facts.QuantumContinued) -> None:
        self._stopped(fact)
        phase = Phase(fact.phase)
        clock = self._clock(fact.worker, "engine" if phase is Phase.ROLLOUT else "tools")
        self._places.started(fact.key, Slot(fact.worker, phase, self.now_s))
        self._runs(clock, phase, 1)

    def _stopped(self, fact: Any) -> None:
        if (slot := self._places.stopped(fact.key)) is not None:  # most parked trajectories were stopped before
            self._runs(self._clocks[slot.worker], slot.phase, -1)

    def _runs(self, clock: WorkerClock, phase: Phase, more: int) -> None:
        clock.count_slots(self.now_s)
        if phase is Phase.ROLLOUT:
            clock.running += more
        else:
            clock.acting += more
        self._update(clock)

    def _ended(self, fact: facts.TrajectoryEnded) -> None:
        self._stopped(fact)
        self._places.ended(fact.key)
        self._has_ended = True

    # ---------------------------------------------------------------- training

    def _training(self, fact: Fact) -> None:
        match fact:
            case facts.GateParked():
                self._gates.add(fact.iteration)
            case facts.OpenGate():
                self._gates.discard(fact.iteration)
                self._has_ended = False
            case facts.BatchParked() | facts.WaveParked():
                self._batches_parked.add(fact.batch)
            case facts.OpenBatch():
                self._batches_parked.discard(fact.batch)
                if not self._batches_opened:
                    self._prepared_s = self.now_s
                self._batches_opened.add(fact.batch)
            case facts.OpenWave() if fact.members:
                self._waves_opened[fact.batch, fact.wave] = self.now_s
            case facts.WaveTrained():
                self._wave_trained(fact)
            case facts.StepFinished():
                self._batches_opened = {batch for batch in self._batches_opened if batch > fact.step}
                self._waves_opened = {at: t_s for at, t_s in self._waves_opened.items() if at[0] > fact.step}
                self._stepped = fact.step
                for clock in self._clocks.values():
                    if clock.kind == "trainer" and not clock.hybrid:
                        clock.relabel(self._prepared_s, self.now_s - fact.train_s, "batch", _NOT_TRAINING)
            case facts.VersionPublished():
                self._published = max(self._published, fact.version)
                self._prepared_s = self.now_s

    def _wave_trained(self, fact: facts.WaveTrained) -> None:
        """A wave counts as training only from the start of its gradient."""
        start_s = self.now_s - fact.train_s
        opened_s = min(self._waves_opened.pop((fact.batch, fact.wave), start_s), start_s)
        hybrids = []
        for clock in self._clocks.values():
            if clock.kind == "trainer" and clock.hybrid:
                clock.relabel(opened_s, self.now_s, "wave", _NOT_IN_WAVES)
                hybrids += [clock] if clock.ready_s < self.now_s else []
            elif clock.kind == "trainer":
                clock.relabel(opened_s, start_s, "batch", _NOT_TRAINING)
                clock.relabel(start_s, self.now_s, "training", _NOT_WAITING)
        for clock in sorted(hybrids, key=lambda each: each.ready_s)[: fact.hybrids]:
            clock.relabel(max(start_s, clock.ready_s), self.now_s, "turned", _NOT_IN_WAVES)

    # ---------------------------------------------------------------- workers and engines

    def _engine(self, fact: Fact) -> None:
        match fact:
            case facts.EngineDeclared():
                self._clock(fact.worker, "engine").gpus = max(fact.tp, 1)
            case facts.VersionServed():
                clock = self._clock(fact.worker, "engine")
                clock.served, clock.quarantined, clock.gpus = True, False, max(fact.tp, 1)
                self._update(clock)
                clock.relabel(self.now_s - fact.load_s, self.now_s, "moving", _NOT_LOADING)
            case facts.VersionChecked():
                clock = self._clock(fact.worker, "engine")
                clock.relabel(self.now_s - fact.stopped_s, self.now_s, "moving", _NOT_LOADING)
            case facts.EngineQuarantined():
                self._clock(fact.worker, "engine").quarantined = True
            case facts.WorkerCapacity():
                self._capacity(fact)
                return
            case _:
                return
        self._update(self._clocks[fact.worker])

    def _capacity(self, fact: facts.WorkerCapacity) -> None:
        known = self._clocks.get(fact.worker)
        if known is None and not (fact.rollout_slots or fact.tool_slots):
            return
        kind: Kind = "engine" if fact.rollout_slots else "tools" if known is None else known.kind
        clock = self._clock(fact.worker, kind)
        clock.count_slots(self.now_s)
        clock.num_slots = fact.tool_slots if clock.kind == "tools" else fact.rollout_slots

    def _membership(self, fact: Any) -> None:
        if isinstance(fact, facts.GangFormed | facts.GangLost):
            self._group_lost = isinstance(fact, facts.GangLost)
            for name in fact.members if isinstance(fact, facts.GangFormed) else ():
                clock = self._clock(name, "trainer")
                if not clock.running and not clock.acting:
                    clock.kind = "trainer"
                    self._update(clock)
        if not isinstance(fact, facts.WorkerJoined | facts.WorkerLost | facts.WorkerWithdrawn):
            return
        if fact.worker not in self._clocks:
            return
        clock = self._clocks[fact.worker]
        clock.count_slots(self.now_s)
        match fact:
            case facts.WorkerJoined():
                if clock.hybrid:  # lost while training
                    clock.kind, clock.ready_s = "engine", math.inf
                if clock.kind != "trainer":
                    self._clock(fact.worker, clock.kind).served = False
            case facts.WorkerLost() if clock.hybrid and not clock.changing:  # a worker with slots is also withdrawn
                clock.kind, clock.away, clock.ready_s = "engine", True, math.inf
            case facts.WorkerWithdrawn() if clock.changing:  # no slots any more; running quanta continue
                clock.num_slots = 0
            case facts.WorkerWithdrawn() if clock.kind != "trainer":
                for key in self._places.on(fact.worker):
                    if (slot := self._places.stopped(key)) is not None:
                        self._runs(clock, slot.phase, -1)
                clock.away, clock.served = True, False
        self._update(clock)

    # ---------------------------------------------------------------- roles

    def _roles(self, fact: Fact) -> None:
        match fact:
            case facts.Turn():
                self._switches[fact.worker] = fact.to
                if fact.to == "training":
                    self._clock(fact.worker, "engine").hybrid = True
            case facts.TurnRefused():
                if fact.worker in self._clocks and self._switches.get(fact.worker) == "training":
                    self._clocks[fact.worker].hybrid = False
            case facts.RoleChangeStarted():
                self._role_change_started(fact)
            case facts.RoleChangeFailed() | facts.RoleChangeCancelled():
                for name in self._changes.pop(fact.generation, ()):  # workers still present change back at once
                    if (clock := self._clocks.get(name)) is not None and clock.changing:
                        clock.count_slots(self.now_s)
                        clock.changing, clock.away, clock.served = "", True, False
                        self._update(clock)
            case facts.RoleStage(stage="state") if fact.worker in self._clocks:
                self._clocks[fact.worker].ready_s = self.now_s
                self._update(self._clocks[fact.worker])
            case facts.RoleChanged():
                self._has_role(fact.worker, fact.to_role, fact.to_tp)
            case facts.RoleRestored():
                self._has_role(fact.worker, fact.role, fact.tp)

    def _role_change_started(self, fact: facts.RoleChangeStarted) -> None:
        self._changes[fact.generation] = tuple(fact.assignments)
        for name, has in fact.assignments.items():
            if (clock := self._clocks.get(name)) is not None:
                trains, clock = has.get("role") == "train", self._clock(name, clock.kind)
                clock.changing = ("turning" if trains else "returning") if clock.hybrid else "role"
                if trains:  # an engine that switches back first ends its slice
                    clock.ready_s = math.inf
                self._update(clock)

    def _has_role(self, name: str, role: str, tp: int) -> None:
        clock = self._clock(name, "trainer" if role == "train" else "engine")
        clock.changing, clock.lent, clock.hybrid = "", role == "lent", clock.hybrid and role == "train"
        clock.kind = "trainer" if role == "train" else "engine"
        clock.ready_s = clock.ready_s if role == "train" else math.inf
        clock.gpus = 0 if clock.lent else max(tp, 1) if role == "rollout" else 1
        clock.served = clock.served or role == "rollout"
        self._update(clock)


OF_TRAJECTORIES: Final[dict[type[Fact], Callable[[WorkerTimes, Any], None]]] = {
    facts.TrajectoryParked: WorkerTimes._parked,
    facts.TrajectoryEnded: WorkerTimes._ended,
    facts.QuantumDispatched: WorkerTimes._started,
    facts.QuantumContinued: WorkerTimes._started,
    facts.QuantumFinished: WorkerTimes._stopped,
    facts.QuantumLost: WorkerTimes._stopped,
    facts.QuantumGivenBack: WorkerTimes._stopped,
    facts.TrajectoryFoundEnded: WorkerTimes._stopped,
}
"""Handlers of the frequent facts."""
