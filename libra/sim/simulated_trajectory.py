"""State of a simulation: agenda, open trajectories, waiting groups, and the teacher."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from libra.errors import ConfigError
from libra.policy.waves import GroupId
from libra.sim.workload import TrajectoryPlan, TurnPlan, Workload
from libra.types import Phase


@dataclass(slots=True)
class Agenda:
    """Future events by time, and the virtual time."""

    now_s: float = 0.0
    entries: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = field(default_factory=list)
    added: int = 0

    def at(self, at_s: float, happens: Callable[..., None], *what: object) -> None:
        """Schedule a call; calls at equal times run in order of insertion."""
        self.added += 1
        heapq.heappush(self.entries, (at_s, self.added, happens, what))

    def advance(self) -> int:
        """Make all calls of the next instant; returns their number."""
        entries, called = self.entries, 0
        now_s = self.now_s = entries[0][0]
        while entries and entries[0][0] == now_s:
            _, _, happens, what = heapq.heappop(entries)
            happens(*what)
            called += 1
        return called


@dataclass(slots=True)
class SimulatedTrajectory:
    """An open trajectory.

    ``attempt`` counts started quanta, so that events of earlier attempts are ignored. ``generated``
    are the tokens of the present turn so far: from earlier parts, and from an engine that handed
    the trajectory over.
    """

    key: str
    plan: TrajectoryPlan
    group: str
    context_tokens: int
    turn: int = 0
    quanta: int = 0
    computed_tokens: int = 0
    phase: Phase = Phase.ROLLOUT
    started_s: float = 0.0
    attempt: int = 0
    generated: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Iteration and group."""
        return self.plan.iteration, self.plan.group

    @property
    def turn_plan(self) -> TurnPlan:
        """The present turn."""
        return self.plan.turns[self.turn]


class WorkloadGroups:
    """Groups of a workload by iteration: open trajectories, and the first one's version."""

    def __init__(self, workload: Workload) -> None:
        self.plans: dict[int, list[TrajectoryPlan]] = {}
        for plan in workload.trajectories:
            self.plans.setdefault(plan.iteration, []).append(plan)
        self.missing = Counter((plan.iteration, plan.group) for plan in workload.trajectories)
        self.oldest: dict[tuple[int, int], int] = {}
        sizes = {len({plan.group for plan in plans}) for plans in self.plans.values()}
        if len(sizes) != 1 or sorted(self.plans) != list(range(len(self.plans))):
            raise ConfigError("workload: iterations 0, 1, ... must have equally many groups each, as batches do")
        self.per_iteration = sizes.pop()


class TeacherQueue:
    """The teacher of a simulated run: it scores finished groups one by one, ``token_s`` per token."""

    def __init__(self, token_s: float, plans: Iterable[TrajectoryPlan]) -> None:
        self._group_s: dict[GroupId, float] = {}
        for plan in plans if token_s else ():
            place = (plan.iteration, plan.group)
            self._group_s[place] = self._group_s.get(place, 0.0) + token_s * plan.final_tokens
        self._scored_s: dict[GroupId, float] = {}
        self._free_s = 0.0

    def committed(self, place: GroupId, now_s: float) -> None:
        """Queue a complete group for the teacher."""
        self._free_s = self._scored_s[place] = max(self._free_s, now_s) + self._group_s.get(place, 0.0)

    def scored_s(self, places: Iterable[GroupId], now_s: float) -> float:
        """Seconds at which all of these groups are scored, at least ``now_s``."""
        return max([now_s, *(self._scored_s[place] for place in places)])
