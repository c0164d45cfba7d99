"""The whole system in virtual time: gates, trajectories, engines, tools, batches, weight updates and lost workers.

The same policy objects decide as in the live plugin: `Admission` opens gates and batches, an `Ordering` gives places, the
`Dispatcher` gives slots. The simulator only carries out, and tells them what happened.

Invariants
----------
1. Virtual time never runs backwards, and no wall clock is read.
2. The same workload, fleet, ordering and seed give the same events: the agenda breaks ties by insertion.
3. Every trajectory of the workload ends exactly once; each of its turns is generated exactly once, and one that was lost with
   its engine is generated again from its beginning.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from libra.errors import ConfigError
from libra.hardware import Residuals
from libra.hardware.virtual_engine import Request, VirtualEngine
from libra.policy import (
    Admission,
    BoundariesSet,
    CommittedGroup,
    Dispatcher,
    Event,
    OnlineLearner,
    OpenBatch,
    OpenGate,
    Oracle,
    Ordering,
    QuantumFinished,
    QuantumStarted,
    TrajectoryEnded,
    TrajectoryParked,
    VersionPublished,
    WorkerJoined,
    WorkerLeft,
    learns_after,
)
from libra.sim.engines import NOTHING_BETWEEN, Between, EngineSpec, typical_context
from libra.sim.outcome import Dispatched, SimulationResult
from libra.sim.workload import TrajectoryPlan, TurnPlan, Workload, prompts_of
from libra.types import NO_TOOL, Phase

TOOLS = "tools"
"""Name of the one worker that runs all tools."""


class Loss(NamedTuple):
    """A worker that dies at ``at_s`` and is back, empty, ``away_s`` later (None: never)."""

    worker: str
    at_s: float
    away_s: float | None = None


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """What there is beside engines and policy.

    Attributes
    ----------
    eta : int
        Staleness bound in versions; 0 is synchronous.
    train_s, load_s : float
        Seconds of an optimizer step with its weight update, and of an engine's change to the new weights.
    steps_s : tuple of float
        ``train_s`` of the first steps, where they are known one by one.
    tool_slots : int or None
        Actions at once. None: as many as are asked for, and actions do not wait in the scheduler.
    inline_tools : frozenset of str
        Tools that run within the generation's slot; their trajectory goes on in it where nobody waits for one. The empty name is
        that of calls which could not be read.
    tool_between : Between
        Of actions, where they have slots.
    gate_s, commit_s : float
        From a gate to its first trajectory, and from a group's last end to its record.
    reserve : (int, int) or None
        An engine holds KV free for the most that a turn may have: so many tokens, in a context of at most so many. None: for those
        that it will have.
    residuals : Residuals or None
        What measured seconds leave of predicted ones, to be drawn from. None: seconds are as predicted.
    losses : tuple of Loss
    boundaries : tuple of (TP degree, tokens)
        As of `libra.policy.messages.BoundariesSet`; empty: none.
    """

    eta: int = 0
    train_s: float = 0.0
    load_s: float = 0.0
    steps_s: tuple[float, ...] = ()
    tool_slots: int | None = None
    inline_tools: frozenset[str] = frozenset()
    tool_between: Between = NOTHING_BETWEEN
    gate_s: float = 0.0
    commit_s: float = 0.0
    reserve: tuple[int, int] | None = None
    residuals: Residuals | None = None
    losses: tuple[Loss, ...] = ()
    boundaries: tuple[tuple[int, float], ...] = ()

    def step_s(self, batch: int) -> float:
        """Seconds of step ``batch`` with its weight update."""
        return self.steps_s[batch] if batch < len(self.steps_s) else self.train_s


@dataclass(slots=True)
class _Run:
    """A trajectory on its way."""

    key: str
    plan: TrajectoryPlan
    group: str
    context_tokens: int
    turn: int = 0
    quanta: int = 0
    computed_tokens: int = 0
    phase: Phase = Phase.ROLLOUT
    started_s: float = 0.0
    attempt: int = 0  # a tool's return of an earlier one is void


@dataclass(slots=True)
class _Record:
    """What is kept for the outcome."""

    dispatched: list[Dispatched] = field(default_factory=list)
    ended_s: dict[str, float] = field(default_factory=dict)
    group_s: dict[tuple[int, int], float] = field(default_factory=dict)
    rollout_s: dict[int, float] = field(default_factory=dict)  # when the last trajectory of an iteration ended
    iteration_s: dict[int, float] = field(default_factory=dict)
    gate_s: dict[int, float] = field(default_factory=dict)
    moves: int = 0
    lost_quanta: int = 0


class Simulator:
    """One workload on one fleet under one ordering; `run` it once."""

    def __init__(
        self,
        workload: Workload,
        engines: Sequence[EngineSpec],
        ordering: Ordering,
        *,
        seed: int = 0,
        surroundings: SimulationOptions | None = None,
    ) -> None:
        around = self._around = SimulationOptions() if surroundings is None else surroundings
        self._workload, self._ordering = workload, ordering
        self._dispatcher = Dispatcher(sure=isinstance(ordering, Oracle))
        self._specs = {spec.name: spec for spec in engines}
        if len(self._specs) != len(engines):
            raise ConfigError("engines: two have the same name; name them apart")
        streams = np.random.SeedSequence(seed).spawn(len(engines))
        self._streams = {spec.name: np.random.default_rng(s) for spec, s in zip(engines, streams, strict=True)}
        self._luck = np.random.default_rng([seed, 0xBE7])
        self._engines: dict[str, VirtualEngine] = {}
        self._context = typical_context(workload.trajectories)
        self._runs: dict[str, _Run] = {}
        self._home: dict[str, str] = {}
        self._members: dict[tuple[int, int], int] = {}
        self._plans: dict[int, list[TrajectoryPlan]] = {}
        for plan in workload.trajectories:
            place = (plan.iteration, plan.group)
            self._members[place] = self._members.get(place, 0) + 1
            self._plans.setdefault(plan.iteration, []).append(plan)
        sizes = {len({plan.group for plan in plans}) for plans in self._plans.values()}
        if len(sizes) != 1 or sorted(self._plans) != list(range(len(self._plans))):
            raise ConfigError("workload: iterations 0, 1, ... must have equally many groups each, as batches do")
        self._admission = Admission(around.eta, sizes.pop())
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._phases = tuple(Phase) if around.tool_slots is not None else (Phase.ROLLOUT,)
        self._serial = 0
        self._now = 0.0
        self._oldest: dict[tuple[int, int], int] = {}
        self._num_ended = self._learned_ended = 0
        self._on_the_way: dict[str, str] = {}  # keys that hold a slot of an engine without being in it
        self._contended = False  # whether anybody waits for a slot of an engine, as workers are told
        self._learns = ordering if isinstance(ordering, OnlineLearner) else None
        self.record = _Record()

    @property
    def surroundings(self) -> SimulationOptions:
        """What there is beside engines and policy."""
        return self._around

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        """Its engines."""
        return tuple(self._specs.values())

    def run(self) -> SimulationResult:
        """Everything from the first gate to the last batch."""
        for spec in self._specs.values():
            self._join(spec)
            for at_s, joined in spec.told[1:]:
                self._at(at_s, self._retell, joined)
        if self._around.tool_slots is not None:
            self._tell(WorkerJoined(TOOLS, tool_slots=self._around.tool_slots))
        if self._around.boundaries:
            self._tell(BoundariesSet(self._around.boundaries))
        for loss in self._around.losses:
            if loss.worker not in self._specs:
                raise ConfigError(f"losses: no engine is named {loss.worker!r}; there are {', '.join(self._specs)}")
            self._at(loss.at_s, self._lose, loss)
        self._carry_out(self._admission.version_published(0))
        for iteration in range(len(self._plans)):
            self._carry_out(self._admission.gate_parked(iteration))
            self._carry_out(self._admission.batch_parked(iteration))
        self._dispatch()
        agenda = self._agenda
        while agenda and not self._over():
            now, _, happens, what = heapq.heappop(agenda)
            self._now = now
            happens(*what)
            while agenda and agenda[0][0] == now:
                _, _, happens, what = heapq.heappop(agenda)
                happens(*what)
            self._dispatch()
        missing = len(self._workload.trajectories) - len(self.record.ended_s)
        if missing:
            raise ConfigError(
                f"{missing} trajectories can never run: {self._dispatcher.num_waiting(Phase.ROLLOUT)} wait for engines "
                f"({len(self._engines)} are there), {self._dispatcher.num_waiting(Phase.TOOL)} for tools"
            )
        return SimulationResult.of(
            self._workload, self.record, {n: e.counters for n, e in self._engines.items()}, self._now
        )

    def _over(self) -> bool:
        return len(self.record.ended_s) == len(self._workload.trajectories) and len(self.record.iteration_s) == len(
            self._plans
        )

    # ---------------------------------------------------------------- what happens

    def _at(self, at_s: float, happens: Callable[..., None], *what: object) -> None:
        self._serial += 1
        heapq.heappush(self._agenda, (at_s, self._serial, happens, what))

    def _tell(self, event: Event) -> None:
        self._dispatcher.handle(event)
        answers = self._ordering.handle(event)
        if answers:
            self._dispatcher.apply(answers)

    def _join(self, spec: EngineSpec) -> None:
        self._engines[spec.name] = VirtualEngine(
            spec.name, spec.tables, residuals=self._around.residuals, rng=self._streams[spec.name]
        )
        self._tell(spec.joined(self._context))

    def _retell(self, joined: WorkerJoined) -> None:
        if joined.worker in self._engines:
            self._tell(joined)

    def _lose(self, loss: Loss) -> None:
        engine = self._engines.pop(loss.worker, None)
        if engine is None:
            return
        self._tell(WorkerLeft(loss.worker))
        for key in [key for key, home in self._home.items() if home == loss.worker]:
            del self._home[key]
        between = [key for key, worker in self._on_the_way.items() if worker == loss.worker]
        for key in (*engine.lost(), *between):
            self.record.lost_quanta += 1
            self._on_the_way.pop(key, None)
            self._runs[key].attempt += 1
            self._park(self._runs[key])
        if loss.away_s is not None:
            self._at(self._now + loss.away_s, self._join, self._specs[loss.worker])

    def _carry_out(self, commands: Sequence[object]) -> None:
        for command in commands:
            match command:
                case OpenGate(iteration=iteration):
                    self.record.gate_s[iteration] = self._now
                    if self._around.gate_s:
                        self._at(self._now + self._around.gate_s, self._begin, iteration)
                    else:
                        self._begin(iteration)
                case OpenBatch(batch=batch):
                    self._at(self._now + self._around.step_s(batch), self._trained, batch)

    def _begin(self, iteration: int) -> None:
        self._ordering.handle(prompts_of(self._workload, self._plans[iteration]))
        for plan in self._plans[iteration]:
            key, group = self._workload.key(plan), self._workload.group_key(plan)
            run = self._runs[key] = _Run(key, plan, group, plan.prompt_tokens)
            self._park(run)

    def _trained(self, batch: int) -> None:
        self.record.iteration_s[batch] = self._now
        version = batch + 1
        self._tell(VersionPublished(version))
        if version < len(self._plans):
            for engine in self._engines.values():
                engine.load(self._now, self._around.load_s)
                self._next_of(engine)
        self._carry_out(self._admission.version_published(version))

    # ---------------------------------------------------------------- quanta

    def _park(self, run: _Run) -> None:
        # Live, nobody has counted the tokens of its prompt before an engine has.
        context = run.context_tokens if run.quanta else 0
        plan = run.plan
        self._tell(TrajectoryParked(run.key, plan.iteration, run.phase, run.quanta, run.group, plan.family, context))

    def _dispatch(self) -> None:
        touched: dict[str, VirtualEngine] = {}
        for phase in self._phases:
            for place in self._dispatcher.dispatch(phase):
                key, worker = place.key, place.worker
                run = self._runs[key]
                self.record.dispatched.append(Dispatched(self._now, phase, key, run.quanta, worker, place.reason))
                answers = self._ordering.handle(QuantumStarted(key, phase, worker))
                if answers:
                    self._dispatcher.apply(answers)
                run.attempt += 1
                if phase is Phase.TOOL:
                    self._call(run)
                    continue
                self._settle(run, worker)
                transport_s = self._drawn(self._specs[worker].between.transport_s)
                if transport_s:
                    self._on_the_way[key] = worker
                    self._at(self._now + transport_s, self._arrived, run, run.attempt, worker)
                else:
                    touched[worker] = self._generate(run, worker)
        for engine in touched.values():
            self._next_of(engine)
        self._contended = self._dispatcher.num_waiting(Phase.ROLLOUT) > 0

    def _drawn(self, measured_s: tuple[float, ...]) -> float:
        """One of these."""
        return measured_s[0] if len(measured_s) == 1 else measured_s[int(self._luck.integers(len(measured_s)))]

    def _settle(self, run: _Run, worker: str) -> None:
        home = self._home.get(run.key)
        if home is not None and home != worker:
            self._engines[home].forget(run.key)
            self.record.moves += 1
        self._home[run.key] = worker
        place = (run.plan.iteration, run.plan.group)
        if place not in self._oldest:
            self._oldest[place] = self._admission.version
            self._admission.generation_started(*place, self._admission.version)

    def _arrived(self, run: _Run, attempt: int, worker: str) -> None:
        if run.attempt == attempt:
            del self._on_the_way[run.key]
            self._next_of(self._generate(run, worker))

    def _generate(self, run: _Run, worker: str) -> VirtualEngine:
        engine, plan = self._engines[worker], run.plan
        run.started_s = self._now
        reserve, context = self._around.reserve, run.context_tokens
        request = Request(
            run.key, run.group, context, plan.prompt_tokens, plan.turns[run.turn].new_tokens, run.computed_tokens,
            0 if reserve is None else min(reserve[0], reserve[1] - context),
            plan.contexts[run.turn] if plan.contexts else 0,
        )  # fmt: skip
        engine.submit(self._now, request, ())
        return engine

    def _next_of(self, engine: VirtualEngine) -> None:
        at_s = engine.next_finish_s()
        if at_s is not None:
            self._at(at_s, self._generated, engine, engine.changes)

    def _generated(self, engine: VirtualEngine, changes: int) -> None:
        if engine.changes != changes:  # what was foreseen is void, the engine's batch has changed or it is gone
            return
        worker_s = self._specs[engine.name].between.worker_s
        for request in engine.finished(self._now):
            run = self._runs[request.key]
            turn = run.plan.turns[run.turn]
            held_s = self._drawn(worker_s) + (turn.tool_s if self._is_inline(turn) else 0.0)
            if held_s:
                self._on_the_way[run.key] = engine.name
                self._at(self._now + held_s, self._reported, run, run.attempt, engine.name)
            else:
                self._reported(run, run.attempt, engine.name)
        self._next_of(engine)

    def _reported(self, run: _Run, attempt: int, worker: str) -> None:
        """The scheduler hears of a generation, and of the tools that ran within it."""
        if run.attempt != attempt:
            return
        self._on_the_way.pop(run.key, None)
        turn = run.plan.turns[run.turn]
        run.context_tokens += turn.new_tokens
        run.computed_tokens = run.context_tokens
        inline = self._is_inline(turn)
        tool, status, payload = (turn.tool, turn.status, turn.payload_tokens) if inline else ("", NO_TOOL, 0)
        run.quanta += 2 if inline else 1
        run.context_tokens += payload
        latency_s = round(self._now - run.started_s, 6)  # as the live log keeps it
        self._tell(QuantumFinished(run.key, Phase.ROLLOUT, turn.new_tokens, tool, status, latency_s, payload))
        if inline:
            run.turn += 1
        if run.turn == len(run.plan.turns) or turn.status == NO_TOOL:
            self._end(run)
        elif inline and self._contended:
            self._park(run)
        elif inline:
            self._goes_on(run, worker)
        elif self._around.tool_slots is None:
            run.attempt += 1
            self._call(run)
        else:
            run.phase = Phase.TOOL
            self._park(run)

    def _is_inline(self, turn: TurnPlan) -> bool:
        return turn.status != NO_TOOL and turn.tool in self._around.inline_tools

    def _goes_on(self, run: _Run, worker: str) -> None:
        """Nobody waits for the slot, so the next quantum begins in it at once."""
        self._tell(QuantumStarted(run.key, Phase.ROLLOUT, worker))
        if worker in self._engines:
            self._next_of(self._generate(run, worker))

    def _call(self, run: _Run) -> None:
        between = self._around.tool_between
        transport_s = self._drawn(between.transport_s)
        run.started_s = self._now + transport_s
        spent_s = transport_s + run.plan.turns[run.turn].tool_s + self._drawn(between.worker_s)
        self._at(self._now + spent_s, self._returned, run, run.attempt)

    def _returned(self, run: _Run, attempt: int) -> None:
        if run.attempt != attempt:
            return
        turn: TurnPlan = run.plan.turns[run.turn]
        run.context_tokens += turn.payload_tokens
        run.quanta += 1
        run.turn += 1
        latency_s = round(self._now - run.started_s, 6)  # as the live log keeps it
        self._tell(QuantumFinished(run.key, Phase.TOOL, 0, turn.tool, turn.status, latency_s, turn.payload_tokens))
        if run.turn == len(run.plan.turns):
            self._end(run)
            return
        run.phase = Phase.ROLLOUT
        self._park(run)

    def _end(self, run: _Run) -> None:
        del self._runs[run.key]
        home = self._home.pop(run.key, None)
        if home is not None:
            self._engines[home].forget(run.key)
        self._tell(TrajectoryEnded(run.key))
        self.record.ended_s[run.key] = self._now
        self.record.rollout_s[run.plan.iteration] = self._now
        self._num_ended += 1
        if self._learns is not None and self._num_ended >= self._learned_ended + learns_after(self._learned_ended):
            self._learned_ended = self._num_ended
            self._learns.learn()
        place = (run.plan.iteration, run.plan.group)
        self._members[place] -= 1
        if not self._members[place]:
            self.record.group_s[place] = self._now
            if self._around.commit_s:
                self._at(self._now + self._around.commit_s, self._commit, place)
            else:
                self._commit(place)

    def _commit(self, place: tuple[int, int]) -> None:
        self._carry_out(self._admission.group_committed(CommittedGroup(*place, self._oldest[place])))
