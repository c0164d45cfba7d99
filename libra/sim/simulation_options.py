"""Engines, settings and results of a simulation: times, tokens, moves, and every dispatch in order."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from libra.errors import ConfigError
from libra.facts import WorkerCapacity, WorkerWithdrawn
from libra.hardware import Residuals
from libra.hardware.engine_tables import Counters, EngineTables, HostPool
from libra.hardware.run_calibration import NO_OVERHEAD, QuantumOverhead
from libra.policy import StalenessPolicy, Verdict, joined_of
from libra.sim.workload import TrajectoryPlan, Workload
from libra.types import Phase

MAX_SLOTS = 256
"""Maximum concurrent generations per engine: a common setting of inference engines."""


class Announced(NamedTuple):
    """A fact about an engine, ``after_s`` seconds after the gate of ``iteration``."""

    iteration: int
    after_s: float
    fact: WorkerCapacity | WorkerWithdrawn


class EngineSpec(NamedTuple):
    """One engine of a simulation; its capacity class is ``bucket_name``, else the TP degree.

    ``announced``: facts about the engine for the policy, the first at once; a withdrawn engine
    generates nothing. Without them, the policy receives the tables' capacity at the start.
    """

    name: str
    tp: int
    slots: int
    tables: EngineTables
    bucket_name: str = ""
    overhead: QuantumOverhead = NO_OVERHEAD
    announced: tuple[Announced, ...] = ()

    @property
    def bucket(self) -> str:
        """Capacity class."""
        return self.bucket_name or f"tp{self.tp}"

    def joined(self, context_tokens: int) -> WorkerCapacity:
        """First event about the engine: announced, else the tables' at ``context_tokens``."""
        if self.announced and isinstance(first := self.announced[0].fact, WorkerCapacity):
            return first
        return joined_of(self.name, self.bucket, self.tables.capacity(self.slots, context_tokens))


def typical_context(plans: Iterable[TrajectoryPlan]) -> int:
    """Mean context at the start of a turn over all ``plans``; 1 without turns."""
    contexts = list[int]()
    for plan in plans:
        grown = accumulate((turn.new_tokens + turn.payload_tokens for turn in plan.turns), initial=plan.prompt_tokens)
        contexts += [*grown][:-1]
    return sum(contexts) // len(contexts) if contexts else 1


def slots_of(tables: EngineTables, context_tokens: int) -> int:
    """Concurrent generations whose contexts of this size fit into KV, between 1 and `MAX_SLOTS`."""
    return max(1, min(MAX_SLOTS, tables.kv_capacity_tokens // max(1, context_tokens)))


def fleet(
    layout: Mapping[int, int], tables: Mapping[int, EngineTables], slots: Mapping[int, int]
) -> tuple[EngineSpec, ...]:
    """Engines of a layout (count by degree); ConfigError if empty, or a degree has no tables."""
    missing = sorted(tp for tp, count in layout.items() if count > 0 and tp not in tables)
    if missing or not any(count > 0 for count in layout.values()):
        raise ConfigError(f"layout {dict(layout)}: degrees {missing or 'none'}; seconds are known for {sorted(tables)}")
    return tuple(
        EngineSpec(f"tp{tp}-{index}", tp, slots[tp], tables[tp]) for tp in sorted(layout) for index in range(layout[tp])
    )


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """Settings of a simulation besides workload, engines and policy."""

    eta: int = 0  # this, ``over_age``, ``window`` and ``in_flight`` form the `StalenessPolicy`
    train_s: float = 0.0  # optimizer step with weight update, for steps beyond ``steps_s``
    load_s: float = 0.0  # an engine's weight load
    publish_s: float = 0.0  # publication during the next step, which ends no earlier
    steps_s: tuple[float, ...] = ()
    tool_slots: int | None = None  # concurrent actions; None: actions never wait in the scheduler
    inline_tools: frozenset[str] = frozenset()  # run in the generation's slot; malformed calls have the empty name
    tool_overhead: QuantumOverhead = NO_OVERHEAD  # of actions, if they have slots
    gate_s: float = 0.0  # from a gate to its first trajectory
    commit_s: float = 0.0  # from the end of a group's last trajectory to its record
    reserve: tuple[int, int] | None = None  # KV reserved for a turn: maximum generated and context tokens
    residuals: Residuals | None = None  # measured over predicted seconds, from which noise is drawn
    chunk_tokens: int | None = None  # maximum tokens per quantum: a longer turn has several quanta
    boundaries: tuple[tuple[int, float], ...] = ()  # (TP degree, tokens)
    host: HostPool | None = None  # host-memory KV pool; None: a trajectory that changes engines is recomputed
    preempts: bool = False  # engines do not reserve KV for whole turns (`libra.hardware.virtual_engine`)
    keeps_kv: bool = False  # KV survives a change of weights
    over_age: Verdict = Verdict.WAIT
    window: int | None = None
    in_flight: int | None = None
    teacher_token_s: float = 0.0  # teacher seconds per token; a step waits for its groups' scores

    @property
    def staleness(self) -> StalenessPolicy:
        """Staleness bound and related limits."""
        return StalenessPolicy(self.eta, self.over_age, self.window, self.in_flight)

    def step_s(self, batch: int) -> float:
        """Seconds of step ``batch`` with its weight update, without the overlapping ``publish_s``."""
        return self.steps_s[batch] if batch < len(self.steps_s) else self.train_s


class Dispatched(NamedTuple):
    """A dispatch: a trajectory received a slot."""

    at_s: float
    phase: Phase
    key: str
    quantum: int
    worker: str
    reason: str


@dataclass(slots=True)
class SimulationRecord:
    """Dispatches, and times of gates, trajectories, groups, rollouts and iterations."""

    dispatched: list[Dispatched] = field(default_factory=list)
    ended_s: dict[str, float] = field(default_factory=dict)
    group_s: dict[tuple[int, int], float] = field(default_factory=dict)
    rollout_s: dict[int, float] = field(default_factory=dict)
    iteration_s: dict[int, float] = field(default_factory=dict)
    gate_s: dict[int, float] = field(default_factory=dict)
    moves: int = 0

    def result(
        self, workload: Workload, counters: Sequence[tuple[str, Counters]], engines: int, end_s: float
    ) -> SimulationResult:
        """The result; an engine that stopped and came back has counters for each period."""
        makespan_s, gate_s, done = max(self.ended_s.values()), self.gate_s, [each for _, each in counters]
        peaks = Counter[str]()
        for name, each in counters:
            peaks[name] = max(peaks[name], each.peak_kv_tokens)
        groups = [at_s - gate_s[iteration] for (iteration, _), at_s in self.group_s.items()]
        return SimulationResult(
            makespan_s=makespan_s,
            group_completion_s=sum(groups) / len(groups),
            iteration_s=tuple(at_s - gate_s[k] for k, at_s in sorted(self.iteration_s.items())),
            rollout_s=tuple(at_s - gate_s[k] for k, at_s in sorted(self.rollout_s.items())),
            trajectories=len(self.ended_s),
            turns=workload.num_turns,
            generated_tokens=sum(each.generated_tokens for each in done),
            prefilled_tokens=sum(each.prefilled_tokens for each in done),
            cached_tokens=sum(each.cached_tokens for each in done),
            recomputed_tokens=sum(each.recomputed_tokens for each in done),
            moves=self.moves,
            busy_frac=sum(each.busy_s for each in done) / (max(end_s, makespan_s) * engines) if makespan_s else 0.0,
            peak_kv_tokens=dict(peaks),
            dispatched=tuple(self.dispatched),
            preempted=sum(each.preempted for each in done),
        )


class SimulationResult(NamedTuple):
    """Result of one simulation; iteration times count from the gate."""

    makespan_s: float  # from the first gate to the end of the last trajectory
    group_completion_s: float  # mean over groups, from gate to the group's last trajectory
    iteration_s: tuple[float, ...]  # from gate to the end of training
    rollout_s: tuple[float, ...]  # from gate to the last trajectory
    trajectories: int
    turns: int
    generated_tokens: int
    prefilled_tokens: int  # context computed
    cached_tokens: int  # context found in the KV cache
    recomputed_tokens: int  # computed context that an engine had computed before
    moves: int  # turns on another engine than the previous turn
    busy_frac: float  # share of engine seconds up to the end of the last trajectory
    peak_kv_tokens: dict[str, int]
    dispatched: tuple[Dispatched, ...]
    preempted: int = 0
    fetched_tokens: int = 0  # KV from host memory

    def digest(self) -> str:
        """Hash over all dispatches with time and place: equal for equal simulations."""
        text = "\n".join(f"{d.at_s!r} {d.phase} {d.key} {d.quantum} {d.worker}" for d in self.dispatched)
        return hashlib.sha256(text.encode()).hexdigest()

    def row(self) -> dict[str, Any]:
        """The figures as JSON-able values, without the dispatches."""
        values = self._asdict()
        del values["dispatched"], values["peak_kv_tokens"]
        tokens_per_s = self.generated_tokens / self.makespan_s if self.makespan_s else 0.0
        return {**values, "tokens_per_s": tokens_per_s, "digest": self.digest()}
