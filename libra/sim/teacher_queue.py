"""The teacher of a simulated run: it scores finished groups one after the other, on a GPU of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from libra.policy.waves import GroupId
from libra.sim.workload import TrajectoryPlan


class TeacherQueue:
    """When each group has its scores. Pure.

    Parameters
    ----------
    token_s : float
        Seconds per token of a trajectory; 0: there is no teacher, or nobody waits for it.
    plans : mapping of int to sequence of TrajectoryPlan
        Trajectories of each iteration.
    """

    def __init__(self, token_s: float, plans: Mapping[int, Sequence[TrajectoryPlan]]) -> None:
        self._group_s: dict[GroupId, float] = {}
        for plan in (plan for of_iteration in plans.values() for plan in of_iteration) if token_s else ():
            place = (plan.iteration, plan.group)
            self._group_s[place] = self._group_s.get(place, 0.0) + token_s * plan.final_tokens
        self._scored_s: dict[GroupId, float] = {}
        self._free_s = 0.0

    def committed(self, place: GroupId, now_s: float) -> None:
        """A group is complete, and waits for the teacher."""
        self._free_s = self._scored_s[place] = max(self._free_s, now_s) + self._group_s.get(place, 0.0)

    def scored_s(self, places: Iterable[GroupId], now_s: float) -> float:
        """When all of these groups have their scores, not before ``now_s``."""
        return max([now_s, *(self._scored_s[place] for place in places)])
