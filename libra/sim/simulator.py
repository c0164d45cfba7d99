"""The system in virtual time: gates, trajectories, engines, tools, batches, weight updates.

The live plugin's policy objects decide: `Admission` opens gates and batches, an `Ordering` sets
priorities, the `Dispatcher` gives slots. The simulator executes their commands, and sends them the
events.

1. Virtual time never runs backwards, and no wall clock is read.
2. The same workload, engines, ordering and seed give the same events: the agenda breaks ties by
   insertion.
3. Every trajectory ends exactly once, and each quantum (a turn, or ``chunk_tokens`` of a turn) is
   generated exactly once: from its start again if lost with its engine, from its last token if
   handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from libra.errors import ConfigError
from libra.facts import (
    BoundariesSet,
    Fact,
    HomeChanged,
    OpenBatch,
    OpenGate,
    Priority,
    QuantumContinued,
    QuantumFinished,
    QuantumStarted,
    SetPriority,
    TrajectoryEnded,
    TrajectoryParked,
    VersionPublished,
    WorkerCapacity,
    WorkerWithdrawn,
)
from libra.hardware.engine_tables import Counters, HostKv, Request
from libra.hardware.run_calibration import QuantumOverhead
from libra.hardware.virtual_engine import VirtualEngine
from libra.policy import Admission, CommittedGroup, Dispatcher, OnlineLearner, Ordering, learns_after, leaves_slot
from libra.policy.engine_capacity import PRIOR_BYTES_PER_S
from libra.sim.simulated_trajectory import Agenda, SimulatedTrajectory, TeacherQueue, WorkloadGroups
from libra.sim.simulation_options import (
    Dispatched,
    EngineSpec,
    SimulationOptions,
    SimulationRecord,
    SimulationResult,
    typical_context,
)
from libra.sim.workload import TurnPlan, Workload, prompts_of
from libra.types import NO_TOOL, Phase

TOOLS = "tools"
"""Name of the single worker that runs all tools."""


class Simulator:
    """One workload on one set of engines under one ordering; `run` it once."""

    def __init__(
        self,
        workload: Workload,
        engines: Sequence[EngineSpec],
        ordering: Ordering,
        *,
        seed: int = 0,
        options: SimulationOptions | None = None,
    ) -> None:
        self.options = SimulationOptions() if options is None else options
        self.record, self.agenda = SimulationRecord(), Agenda()
        self._workload, self._ordering = workload, ordering
        self._dispatcher = Dispatcher(sure=getattr(ordering, "exact_lengths", False))
        self._specs = {spec.name: spec for spec in engines}
        if len(self._specs) != len(engines):
            raise ConfigError("engines: two have the same name; give each its own")
        streams = np.random.SeedSequence(seed).spawn(len(engines))
        self._streams = {spec.name: np.random.default_rng(s) for spec, s in zip(engines, streams, strict=True)}
        self._draws = np.random.default_rng([seed, 0xBE7])
        self.running_engines: dict[str, VirtualEngine] = {}
        self._running: dict[str, SimulatedTrajectory] = {}
        self._home: dict[str, str] = {}
        self._host = None if self.options.host is None else HostKv(self.options.host)
        pool = self.options.host  # prices of a pool are per token, prices of moves per byte
        self._kv_token_bytes = 0 if pool is None else max(1, round(pool.token_s * PRIOR_BYTES_PER_S))
        self._groups = WorkloadGroups(workload)
        self._teacher = TeacherQueue(self.options.teacher_token_s, workload.trajectories)
        self._typical_context = typical_context(workload.trajectories)
        self._admission = Admission(self.options.staleness, self._groups.per_iteration)
        self._published_s = 0.0  # when the newest published version can be pulled
        self._learner, self._learned_ended = (ordering if isinstance(ordering, OnlineLearner) else None), 0
        self._in_transit: dict[str, str] = {}  # keys that hold an engine's slot without being in the engine
        self._ahead: Priority | None = None  # rank of the best waiting generation at the last dispatch
        self._priorities: dict[str, Priority] = {}  # last priorities; engine queues follow them, as live
        self._out_of_date = 0  # obsolete events of this instant
        self._counters: list[tuple[str, Counters]] = []  # of engines that handed their trajectories over
        self._keeps_dispatches = True  # False saves most of a long simulation's memory

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        """Engines in use."""
        return tuple(self._specs.values())

    def run(self) -> SimulationResult:
        """Run from the first gate to the last batch."""
        self.play()
        found = self.record.result(self._workload, self._all_counters(), len(self._specs), self.agenda.now_s)
        return found if self._host is None else found._replace(fetched_tokens=self._host.fetched_tokens)

    def play(self) -> None:
        """Run from the first gate to the last batch, without a result."""
        options, workload, iterations = self.options, self._workload, len(self._groups.plans)
        for spec in self._specs.values():
            self._join(spec)
        if options.tool_slots is not None:
            self.notify(WorkerCapacity(TOOLS, tool_slots=options.tool_slots))
        if options.boundaries:
            self.notify(BoundariesSet(options.boundaries))
        self._open(iterations)
        self._dispatch()
        while self.agenda.entries and not self._is_over(iterations):
            self._out_of_date = 0
            if self.agenda.advance() > self._out_of_date:  # otherwise nothing has changed
                self._dispatch()
        missing = len(workload.trajectories) - len(self.record.ended_s)
        if missing and not self._is_over(iterations):
            raise ConfigError(
                f"{missing} trajectories can never run: {self._dispatcher.num_waiting(Phase.ROLLOUT)} wait for engines "
                f"({len(self.running_engines)} are running), {self._dispatcher.num_waiting(Phase.TOOL)} for tools"
            )

    def _all_counters(self) -> list[tuple[str, Counters]]:
        """Counters of all engines, stopped ones included; an engine that came back has several."""
        return [*self._counters, *((name, engine.counters) for name, engine in self.running_engines.items())]

    def _open(self, iterations: int) -> None:
        self._carry_out(self._admission.version_published(0))
        for iteration in range(iterations):
            self._carry_out(self._admission.gate_parked(iteration))
            self._carry_out(self._admission.batch_parked(iteration))

    def _is_over(self, iterations: int) -> bool:
        record = self.record
        return len(record.ended_s) == len(self._workload.trajectories) and len(record.iteration_s) == iterations

    def notify(self, event: Fact) -> None:
        """Send an event to the policy."""
        self._dispatcher.handle(event)
        self._apply(event)

    def _apply(self, event: Fact) -> None:
        if answers := self._ordering.handle(event):
            self._priorities |= {each.key: each.priority for each in answers if type(each) is SetPriority}
            self._dispatcher.apply(answers)

    # ---------------------------------------------------------------- workers, gates and versions

    def _join(self, spec: EngineSpec, declared: WorkerCapacity | None = None) -> None:
        self.running_engines[spec.name] = VirtualEngine(
            spec.name, spec.tables, residuals=self.options.residuals, rng=self._streams[spec.name],
            preempts=self.options.preempts, host=self._host,
        )  # fmt: skip
        self._announce(declared or spec.joined(self._typical_context))

    def _announce(self, fact: WorkerCapacity | WorkerWithdrawn) -> None:
        if isinstance(fact, WorkerWithdrawn):
            if fact.worker in self.running_engines and len(self.running_engines) > 1:
                self.hand_over(fact.worker)
        elif fact.worker not in self.running_engines:
            self._join(self._specs[fact.worker], fact)
        else:  # without a pool, engines exchange no KV
            self.notify(msgspec.structs.replace(fact, kv_token_bytes=self._kv_token_bytes))

    def hand_over(self, worker: str) -> None:
        """Stop ``worker``'s engine; its trajectories continue elsewhere with their tokens.

        Quanta in transit to or from the engine are lost, and generated again.
        """
        engine = self.running_engines.pop(worker)
        self.notify(WorkerWithdrawn(worker))
        for key in [key for key, home in self._home.items() if home == worker]:
            del self._home[key]
        in_transit = [key for key, place in self._in_transit.items() if place == worker]
        for key in in_transit:
            del self._in_transit[key]
        left = dict.fromkeys(in_transit, 0) | engine.hand_over(self.agenda.now_s)
        self._counters.append((worker, engine.counters))
        for key, generated in left.items():
            one = self._running[key]
            one.attempt += 1
            one.generated += generated
            one.context_tokens += generated
            one.computed_tokens = one.context_tokens if generated or one.computed_tokens else 0
            if self._host is not None and generated:
                self._host.put(key, one.context_tokens)
            self._park(one)

    def _carry_out(self, commands: Sequence[object]) -> None:
        for command in commands:
            match command:
                case OpenGate(iteration=iteration):
                    self.record.gate_s[iteration] = self.agenda.now_s
                    for spec in self._specs.values():
                        for _, after_s, fact in (each for each in spec.announced[1:] if each.iteration == iteration):
                            self.agenda.at(self.agenda.now_s + after_s, self._announce, fact)
                    self._after(self.options.gate_s, self._begin, iteration)
                case OpenBatch(batch=batch, members=members):
                    at_s = self._teacher.scored_s(members, self.agenda.now_s) + self.options.step_s(batch)
                    self.agenda.at(max(at_s, self._published_s), self._step_ended, batch)

    def _after(self, seconds: float, happens: Callable[..., None], *what: object) -> None:
        if seconds:
            self.agenda.at(self.agenda.now_s + seconds, happens, *what)
        else:
            happens(*what)

    def _begin(self, iteration: int) -> None:
        plans = self._groups.plans[iteration]
        self._ordering.handle(prompts_of(self._workload, plans))
        for plan in plans:
            key, group = self._workload.key(plan), self._workload.group_key(plan)
            self._running[key] = SimulatedTrajectory(key, plan, group, plan.prompt_tokens)
            self._park(self._running[key])

    def _step_ended(self, batch: int) -> None:
        if not self.options.publish_s:
            self._trained(batch)
            return
        self._published_s = self.agenda.now_s + self.options.publish_s
        self.agenda.at(self._published_s, self._trained, batch)
        self._carry_out(self._admission.step_ended(batch))

    def _trained(self, batch: int) -> None:
        self.record.iteration_s[batch] = self.agenda.now_s
        version = batch + 1
        self.notify(VersionPublished(version))
        if version < len(self._groups.plans):
            self._take_new_weights()
        self._carry_out(self._admission.version_published(version))

    def _take_new_weights(self) -> None:
        if self._host is not None and not self.options.keeps_kv:
            self._host.clear()
        for engine in self.running_engines.values():
            engine.load(self.agenda.now_s, self.options.load_s, keeps_kv=self.options.keeps_kv)
            self._schedule_next(engine)

    # ---------------------------------------------------------------- quanta

    def _park(self, one: SimulatedTrajectory) -> None:
        context = one.context_tokens if one.quanta else 0  # live, an engine counts the tokens of a prompt first
        plan = one.plan
        self.notify(TrajectoryParked(one.key, plan.iteration, one.phase, one.quanta, one.group, plan.family, context))

    def _dispatch(self) -> None:
        if self.options.tool_slots is None and not self._dispatcher.num_waiting(Phase.ROLLOUT):
            self._ahead = self._dispatcher.ahead()
            return
        touched: dict[str, VirtualEngine] = {}
        for phase in Phase if self.options.tool_slots is not None else (Phase.ROLLOUT,):
            for place in self._dispatcher.dispatch(phase):
                key, worker, one = place.key, place.worker, self._running[place.key]
                if self._keeps_dispatches:
                    self.record.dispatched.append(
                        Dispatched(self.agenda.now_s, phase, key, one.quanta, worker, place.reason)
                    )
                self._apply(QuantumStarted(key, phase, worker))
                one.attempt += 1
                if phase is Phase.TOOL:
                    self._call(one)
                    continue
                self._set_home(one, worker)
                overhead = self._specs[worker].overhead
                transport_s = self._drawn(overhead, overhead.transport_s)
                if transport_s:
                    self._in_transit[key] = worker
                    self.agenda.at(self.agenda.now_s + transport_s, self._arrived, one, one.attempt, worker)
                else:
                    touched[worker] = self.generate(one, worker)
        for engine in touched.values():
            self._schedule_next(engine)
        self._ahead = self._dispatcher.ahead()

    def _drawn(self, overhead: QuantumOverhead, samples_s: tuple[float, ...]) -> float:
        one_s = samples_s[0] if len(samples_s) == 1 else samples_s[int(self._draws.integers(len(samples_s)))]
        return one_s if overhead.idle_frac == 1.0 else one_s * overhead.factor(self._dispatcher.num_running)

    def _set_home(self, one: SimulatedTrajectory, worker: str) -> None:
        home = self._home.get(one.key)
        if home is not None and home != worker:
            self.running_engines[home].forget(one.key)
            self.record.moves += 1
        self._home[one.key] = worker
        if one.place not in self._groups.oldest:
            self._first_generated(one.place, self._admission.version)

    def _first_generated(self, place: tuple[int, int], version: int) -> None:
        self._groups.oldest[place] = version
        self._admission.generation_started(*place, version)

    def _arrived(self, one: SimulatedTrajectory, attempt: int, worker: str) -> None:
        if one.attempt == attempt:
            del self._in_transit[one.key]
            self._schedule_next(self.generate(one, worker))

    def generate(self, one: SimulatedTrajectory, worker: str) -> VirtualEngine:
        """Submit a trajectory's turn to an engine."""
        engine, plan = self.running_engines[worker], one.plan
        one.started_s = self.agenda.now_s
        reserve, context, chunk = self.options.reserve, one.context_tokens, self.options.chunk_tokens
        request = Request(
            one.key, one.group, context, plan.prompt_tokens, self._part_tokens(one), one.computed_tokens,
            0 if reserve is None else min(chunk or reserve[0], reserve[0], reserve[1] - context),
            plan.contexts[one.turn] if plan.contexts and not one.generated else 0,
        )  # fmt: skip
        engine.submit(self.agenda.now_s, request, self._priorities.get(one.key, ()))
        if self._host is not None:
            for tokens, seconds in self._host.fetches():  # a live worker reports transfer times likewise
                num_bytes = tokens * self._kv_token_bytes
                self.notify(HomeChanged(one.key, "", worker, tokens, 0.0, seconds, True, seconds, num_bytes, ""))
        return engine

    def _schedule_next(self, engine: VirtualEngine) -> None:
        at_s = engine.next_finish_s()
        if at_s is not None:
            self.agenda.at(at_s, self._generated, engine, engine.changes)

    def _generated(self, engine: VirtualEngine, changes: int) -> None:
        if engine.changes != changes:  # the batch has changed since, or the engine was lost
            self._out_of_date += 1
            return
        overhead = self._specs[engine.name].overhead
        for request in engine.finished(self.agenda.now_s):
            one = self._running[request.key]
            turn, held_s = one.turn_plan, self._drawn(overhead, overhead.worker_s)
            if self._is_inline(turn) and self._is_last_part(one):
                held_s += turn.tool_s
            if held_s:
                self._in_transit[one.key] = engine.name
            self._after(held_s, self._reported, one, one.attempt, engine.name)
        self._schedule_next(engine)

    def _reported(self, one: SimulatedTrajectory, attempt: int, worker: str) -> None:
        if one.attempt != attempt:
            return
        self._in_transit.pop(one.key, None)
        turn, new_tokens, ends = one.turn_plan, self._part_tokens(one), self._is_last_part(one)
        one.generated = 0 if ends else one.generated + new_tokens
        one.context_tokens += new_tokens
        one.computed_tokens = one.context_tokens
        if self._host is not None:
            self._host.put(one.key, one.context_tokens)
        inline = ends and self._is_inline(turn)
        tool, status, payload = (turn.tool, turn.status, turn.payload_tokens) if inline else ("", NO_TOOL, 0)
        tools_s = turn.tool_s if inline else 0.0
        one.quanta += 2 if inline else 1
        one.context_tokens += payload
        latency_s = round(self.agenda.now_s - one.started_s, 6)  # rounded as in the live log
        self.notify(QuantumFinished(one.key, Phase.ROLLOUT, new_tokens, tool, status, latency_s, payload, tools_s))
        one.turn += inline
        if ends and (one.turn == len(one.plan.turns) or turn.status == NO_TOOL):
            self._end(one)
        elif (inline or not ends) and leaves_slot(self._priorities.get(one.key, ()), self._ahead):
            self._park(one)
        elif inline or not ends:  # no better trajectory waits: the next quantum starts in the slot at once
            self.notify(QuantumContinued(one.key, Phase.ROLLOUT, worker, one.quanta))
            if worker in self.running_engines:
                self._schedule_next(self.generate(one, worker))
        elif self.options.tool_slots is None:
            one.attempt += 1
            self._call(one)
        else:
            one.phase = Phase.TOOL
            self._park(one)

    def _part_tokens(self, one: SimulatedTrajectory) -> int:
        left = one.turn_plan.new_tokens - one.generated
        return min(left, self.options.chunk_tokens or left)

    def _is_last_part(self, one: SimulatedTrajectory) -> bool:
        return one.generated + self._part_tokens(one) == one.turn_plan.new_tokens

    def _is_inline(self, turn: TurnPlan) -> bool:
        return turn.status != NO_TOOL and turn.tool in self.options.inline_tools

    def _call(self, one: SimulatedTrajectory) -> None:
        overhead = self.options.tool_overhead
        transport_s = self._drawn(overhead, overhead.transport_s)
        one.started_s = self.agenda.now_s + transport_s
        spent_s = transport_s + one.turn_plan.tool_s + self._drawn(overhead, overhead.worker_s)
        self.agenda.at(self.agenda.now_s + spent_s, self._returned, one, one.attempt)

    def _returned(self, one: SimulatedTrajectory, attempt: int) -> None:
        if one.attempt != attempt:
            return
        turn = one.turn_plan
        one.context_tokens += turn.payload_tokens
        one.quanta += 1
        one.turn += 1
        latency_s = round(self.agenda.now_s - one.started_s, 6)  # rounded as in the live log
        self.notify(QuantumFinished(one.key, Phase.TOOL, 0, turn.tool, turn.status, latency_s, turn.payload_tokens))
        if one.turn == len(one.plan.turns):
            self._end(one)
            return
        one.phase = Phase.ROLLOUT
        self._park(one)

    def _end(self, one: SimulatedTrajectory) -> None:
        del self._running[one.key]
        self._priorities.pop(one.key, None)
        home = self._home.pop(one.key, None)
        if home is not None:
            self.running_engines[home].forget(one.key)
        if self._host is not None:
            self._host.drop(one.key)
        self.notify(TrajectoryEnded(one.key))
        self.record.ended_s[one.key] = self.record.rollout_s[one.plan.iteration] = self.agenda.now_s
        num_ended = len(self.record.ended_s)
        if self._learner is not None and num_ended >= self._learned_ended + learns_after(self._learned_ended):
            self._learned_ended = num_ended
            self._learner.learn()
        self._groups.missing[one.place] -= 1
        if not self._groups.missing[one.place]:
            self.record.group_s[one.place] = self.agenda.now_s
            self._after(self.options.commit_s, self._commit, one.place)

    def _commit(self, place: tuple[int, int]) -> None:
        self._teacher.committed(place, self.agenda.now_s)
        self._carry_out(self._admission.group_committed(CommittedGroup(*place, self._groups.oldest[place])))
