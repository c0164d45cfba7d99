"""Actions of recorded agents, and their completion times under several ways to share cores, in
virtual time.

Every way is the same `libra.policy.leases.LeaseTable` as the live scheduler's, asked in different
ways:

leases
    An action requests its cores when its generation has ended, and releases them when it ends.
revocable
    The same, and every action may be stopped, and begun again, for one that waits.
arrival
    As leases, without enlargement.
reserved
    A trajectory holds one core from its begin to its end (static pods); one without a core waits,
    and does not generate.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from libra.facts import Priority
from libra.planner.agent_turns import read_agent_turns
from libra.policy.leases.elastic import SpeedUp
from libra.policy.leases.resources import LeaseRequest, Resources, Revoke
from libra.policy.leases.table import LeaseTable
from libra.sim.workload import tool_seconds
from libra.types import NO_TOOL

Way = Literal["leases", "revocable", "arrival", "reserved"]
REQUIRED = ("task", "turn", "tool", "status", "completion_tokens")
TOKEN_S = 0.02
"""Seconds per generated token of a turn without a time."""
NODE_CORES = 32
"""Cores of one tool worker."""
SLOTS = 100_000
LONG_S = 300.0
STOP_S = 0.05
"""Seconds from a revocation until the lease is released."""


class Step(NamedTuple):
    """One turn: seconds of generation and of its action on a core (0: none), tool, place."""

    llm_s: float
    work_s: float
    tool: str
    priority: Priority = Priority(0, 0, 0)


class Source(NamedTuple):
    """Trajectories of one file; ``measured`` unless the seconds of actions are drawn."""

    name: str
    measured: bool
    trajectories: tuple[tuple[Step, ...], ...]


def read_steps(path: Path, *, seed: int = 0) -> Source | None:
    """The trajectories of a file of agents' turns; None without seconds of tools and gaps between
    turns.

    Missing seconds of tools are drawn from `tool_seconds`; the generation took the rest of the gap,
    at least ``TOKEN_S`` per token.
    """
    rng = np.random.default_rng([seed, 0xAC7])
    recorded = read_agent_turns(path, REQUIRED)
    turns = [turn for one in recorded for turn in one.turns]
    measured = any(turn.tool_s is not None for turn in turns)
    if not measured and all(turn.gap_s is None for turn in turns):
        return None
    found = []
    for one in recorded:
        drawn = tool_seconds(rng, len(one.turns))
        steps = []
        for i, turn in enumerate(one.turns):
            work_s = 0.0 if turn.status == NO_TOOL else float(drawn[i]) if turn.tool_s is None else turn.tool_s
            llm_s = turn.llm_s
            if llm_s is None:
                least_s = TOKEN_S * turn.completion_tokens
                gap_s = one.turns[i + 1].gap_s if i + 1 < len(one.turns) else None
                llm_s = least_s if gap_s is None or measured else max(least_s, gap_s - work_s)
            steps.append(Step(llm_s, work_s, turn.tool or "tool"))
        found.append(tuple(steps))
    return Source(path.stem, measured, tuple(found))


def drawn_load(source: Source, count: int, llm_factor: float, seed: int) -> list[tuple[Step, ...]]:
    """``count`` trajectories of ``source`` in random order, generations scaled."""
    rng = np.random.default_rng([seed, 0x10AD])
    rounds = -(-count // len(source.trajectories))
    order = np.concatenate([rng.permutation(len(source.trajectories)) for _ in range(rounds)])[:count]
    return [
        tuple(step._replace(llm_s=step.llm_s * llm_factor) for step in source.trajectories[index]) for index in order
    ]


def drawn_tests(count: int, seed: int) -> list[tuple[Step, ...]]:
    """40 turns of 20 s each: actions of 2 s, one of 20 takes ``LONG_S`` seconds."""
    rng = np.random.default_rng([seed, 0x7E57])
    found = []
    for _ in range(count):
        long = rng.random(40) < 0.05
        llm_s, work_s = rng.exponential(20.0, 40), rng.gamma(4, 0.25, 40) * np.where(long, LONG_S, 2.0)
        steps = zip(llm_s.tolist(), work_s.tolist(), long.tolist(), strict=True)
        found.append(tuple(Step(llm, work, "long" if is_long else "short") for llm, work, is_long in steps))
    return found


@dataclass
class Outcome:
    """The outcome of a load; ``act_s`` has the seconds from request to end of every action.

    A trajectory's wait for a reservation counts in its first action.
    """

    act_s: list[float] = field(default_factory=list)
    makespan_s: float = 0.0

    @property
    def mean_act_s(self) -> float:
        return float(np.mean(self.act_s))


class ActionSimulation:
    """One load on ``cores`` cores, shared in one way; `run` it once."""

    def __init__(
        self, load: Sequence[Sequence[Step]], cores: int, way: Way, curves: dict[str, SpeedUp] | None = None
    ) -> None:
        self._load, self._way = load, way
        self._curves = curves or {}
        self._workers = [f"w{i}" for i in range(-(-cores // NODE_CORES))]
        self._table = LeaseTable()
        for i, worker in enumerate(self._workers):
            self._table.supply(worker, Resources(slots=SLOTS, cores=min(NODE_CORES, cores - i * NODE_CORES)))
        for tool, curve in self._curves.items():
            larger = curve if way in ("leases", "revocable") else SpeedUp(1, 1, [1.0])
            self._table.declare(tool, larger)
        self._agenda: list[tuple[float, int, str, int, int]] = []
        self._serial = 0
        self._turn = [0] * len(load)
        self._asked_s = [0.0] * len(load)
        self._began_s: dict[int, float] = {}
        self._attempt = [0] * len(load)
        self._stopped: set[int] = set()  # whose action was stopped, and has not ended since
        self._outcome = Outcome()
        self._happens = {"generated": self._generated, "acted": self._acted, "revoked": self._revoked}

    def run(self) -> Outcome:
        for index in range(len(self._load)):
            if self._way == "reserved":
                self._request(f"reserved {index}", "", index)
            else:
                self._generate(index, 0.0)
        self._admit(0.0)
        while self._agenda:
            now_s = self._agenda[0][0]
            while self._agenda and self._agenda[0][0] == now_s:
                _, _, kind, index, attempt = heapq.heappop(self._agenda)
                if attempt == self._attempt[index]:
                    self._happens[kind](index, now_s)
            self._admit(now_s)
            self._outcome.makespan_s = now_s
        assert not self._table.leases()
        return self._outcome

    def _at(self, at_s: float, kind: str, index: int) -> None:
        self._serial += 1
        heapq.heappush(self._agenda, (at_s, self._serial, kind, index, self._attempt[index]))

    def _generate(self, index: int, now_s: float) -> None:
        self._at(now_s + self._load[index][self._turn[index]].llm_s, "generated", index)

    def _generated(self, index: int, now_s: float) -> None:
        step = self._load[index][self._turn[index]]
        if not step.work_s:
            self._next(index, now_s)
        elif self._way == "reserved":
            self._outcome.act_s.append(self._asked_s[index] + step.work_s)
            self._asked_s[index] = 0.0
            self._at(now_s + step.work_s, "acted", index)
        else:
            self._asked_s[index] = now_s
            self._request(str(index), step.tool, index)

    def _request(self, holder: str, tool: str, index: int) -> None:
        elastic = tool if tool in self._curves else ""
        priority = self._load[index][self._turn[index]].priority
        if self._way == "revocable":
            may = index not in self._stopped
            self._table.request(LeaseRequest(holder, Resources(1, 1), tool, revocable=may), priority)
            return
        request = LeaseRequest(holder, Resources(slots=1, cores=1), elastic)
        self._table.request(request, priority)

    def _acted(self, index: int, now_s: float) -> None:
        if self._way != "reserved":
            self._table.release(str(index), now_s - self._began_s[index])
            self._stopped.discard(index)
            self._outcome.act_s.append(now_s - self._asked_s[index])
        self._next(index, now_s)

    def _revoked(self, index: int, now_s: float) -> None:
        self._table.release(str(index))
        self._request(str(index), self._load[index][self._turn[index]].tool, index)

    def _next(self, index: int, now_s: float) -> None:
        self._turn[index] += 1
        if self._turn[index] < len(self._load[index]):
            self._generate(index, now_s)
        elif self._way == "reserved":
            self._table.release(f"reserved {index}")

    def _admit(self, now_s: float) -> None:
        for lease in self._table.admit(now_s):
            if isinstance(lease, Revoke):
                index = int(lease.holder)
                self._attempt[index] += 1
                self._stopped.add(index)
                self._at(now_s + STOP_S, "revoked", index)
                continue
            if self._way == "reserved":
                index = int(lease.holder.removeprefix("reserved "))
                self._asked_s[index] = now_s  # it waited since 0
                self._generate(index, now_s)
                continue
            index = int(lease.holder)
            step, cores = self._load[index][self._turn[index]], lease.resources.cores
            curve = self._curves.get(step.tool)
            took_s = step.work_s / (curve.speed(cores) if curve is not None else 1.0)
            self._began_s[index] = now_s
            self._at(now_s + took_s, "acted", index)
