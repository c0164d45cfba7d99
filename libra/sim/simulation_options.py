"""Engines and settings of a simulation, and its result: times, tokens, moves, and every dispatch in
order."""

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
"""Maximum concurrent generations of an engine, as inference engines are usually configured."""


class Announced(NamedTuple):
    """A fact about an engine, ``after_s`` seconds after the gate of ``iteration`` opened."""

    iteration: int
    after_s: float
    fact: WorkerCapacity | WorkerWithdrawn


class EngineSpec(NamedTuple):
    """One engine of a simulation; without a ``bucket_name`` all engines of one degree are a
    capacity class.

    ``announced`` are the facts that the policy receives about it, the first one at once; while it
    is withdrawn it generates nothing. Empty: its tables, from the beginning.
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
        """Its capacity class."""
        return self.bucket_name or f"tp{self.tp}"

    def joined(self, context_tokens: int) -> WorkerCapacity:
        """The first event about it that the policy receives; without ``announced``, from its tables
        at contexts of this many tokens."""
        if self.announced and isinstance(first := self.announced[0].fact, WorkerCapacity):
            return first
        return joined_of(self.name, self.bucket, self.tables.capacity(self.slots, context_tokens))


def typical_context(plans: Iterable[TrajectoryPlan]) -> int:
    """Mean context at the beginning of a turn, over the turns of ``plans``; 1 without a turn."""
    contexts = list[int]()
    for plan in plans:
        grown = accumulate((turn.new_tokens + turn.payload_tokens for turn in plan.turns), initial=plan.prompt_tokens)
        contexts += [*grown][:-1]
    return sum(contexts) // len(contexts) if contexts else 1


def slots_of(tables: EngineTables, context_tokens: int) -> int:
    """Concurrent generations such that contexts of this size fit into the KV memory; at least 1, at
    most `MAX_SLOTS`."""
    return max(1, min(MAX_SLOTS, tables.kv_capacity_tokens // max(1, context_tokens)))


def fleet(
    layout: Mapping[int, int], tables: Mapping[int, EngineTables], slots: Mapping[int, int]
) -> tuple[EngineSpec, ...]:
    """Engines of a layout (engines by degree); ConfigError if it has none, or a degree has no seconds."""
    missing = sorted(tp for tp, count in layout.items() if count > 0 and tp not in tables)
    if missing or not any(count > 0 for count in layout.values()):
        raise ConfigError(f"layout {dict(layout)}: degrees {missing or 'none'}; seconds are known for {sorted(tables)}")
    return tuple(
        EngineSpec(f"tp{tp}-{index}", tp, slots[tp], tables[tp]) for tp in sorted(layout) for index in range(layout[tp])
    )


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """Settings of a simulation besides workload, engines and policy."""

    eta: int = 0  # this and ``over_age``, ``window``, ``in_flight`` are the `StalenessPolicy`
    train_s: float = 0.0  # of an optimizer step with its weight update, beyond the first steps with ``steps_s``
    load_s: float = 0.0  # of an engine's change to new weights
    publish_s: float = 0.0  # of a publication beside the next step, which does not end before
    steps_s: tuple[float, ...] = ()
    tool_slots: int | None = None  # actions at once; without a limit actions do not wait in the scheduler
    inline_tools: frozenset[str] = frozenset()  # run within the generation's slot; malformed calls have the empty name
    tool_overhead: QuantumOverhead = NO_OVERHEAD  # of actions, if they have slots
    gate_s: float = 0.0  # from a gate to its first trajectory
    commit_s: float = 0.0  # from a group's last end to its record
    reserve: tuple[int, int] | None = None  # KV reserved for a turn: most generated, most context tokens
    residuals: Residuals | None = None  # ratios of measured to predicted seconds, from which noise is drawn
    chunk_tokens: int | None = None  # most tokens of one quantum: a longer turn has several
    boundaries: tuple[tuple[int, float], ...] = ()  # TP degree, tokens
    host: HostPool | None = None  # KV in host memory; without it a trajectory that changes engines is computed again
    preempts: bool = False  # engines do not reserve KV for whole turns (`libra.hardware.virtual_engine`, invariant 3)
    keeps_kv: bool = False  # KV stays over a change of weights
    over_age: Verdict = Verdict.WAIT
    window: int | None = None
    in_flight: int | None = None
    teacher_token_s: float = 0.0  # of the teacher per token of a trajectory; a step waits for its groups' scores

    @property
    def staleness(self) -> StalenessPolicy:
        """How old what a step consumes may be."""
        return StalenessPolicy(self.eta, self.over_age, self.window, self.in_flight)

    def step_s(self, batch: int) -> float:
        """Seconds of step ``batch`` with its weight update, as far as that is not ``publish_s``."""
        return self.steps_s[batch] if batch < len(self.steps_s) else self.train_s


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
    """Dispatches of a simulation, and when gates opened and trajectories, groups, rollouts and
    iterations ended."""

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
        """The result; an engine that stopped and came back has counters of each time."""
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
    """Result of one simulation; seconds of iterations are from their gates."""

    makespan_s: float  # from the first gate to the end of the last trajectory
    group_completion_s: float  # mean over groups, from its iteration's gate to its last trajectory's end
    iteration_s: tuple[float, ...]  # to the end of training
    rollout_s: tuple[float, ...]  # to the end of its last trajectory
    trajectories: int
    turns: int
    generated_tokens: int
    prefilled_tokens: int  # context computed
    cached_tokens: int  # context whose KV was cached
    recomputed_tokens: int  # computed context that some engine had computed before
    moves: int  # turns that began on another engine than the previous turn
    busy_frac: float  # of the engines' seconds, up to the last trajectory's end
    peak_kv_tokens: dict[str, int]
    dispatched: tuple[Dispatched, ...]
    preempted: int = 0
    fetched_tokens: int = 0  # KV from host memory

    def digest(self) -> str:
        """Hash of every dispatch with its time and place: equal for equal simulations."""
        text = "\n".join(f"{d.at_s!r} {d.phase} {d.key} {d.quantum} {d.worker}" for d in self.dispatched)
        return hashlib.sha256(text.encode()).hexdigest()

    def row(self) -> dict[str, Any]:
        """The figures as JSON-able values, without the list of dispatches."""
        values = self._asdict()
        del values["dispatched"], values["peak_kv_tokens"]
        tokens_per_s = self.generated_tokens / self.makespan_s if self.makespan_s else 0.0
        return {**values, "tokens_per_s": tokens_per_s, "digest": self.digest()}
