"""A training run whose engines have versions of their own, and hand over in ramp-down (`systems.own_versions`) or are shared
out among versions (`systems.version_window`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.systems.own_versions import REPACK_S, OwnVersions
from benchmarks.systems.pipeline import Pipeline
from benchmarks.systems.version_window import VersionWindow
from libra.sim.simulated_trajectory import SimulatedTrajectory
from libra.sim.workload import TrajectoryPlan


class RepackingPipeline(Pipeline):
    """A pipeline of a discipline with ``own_versions``; what is handed over is computed again where it goes on, unless KV moves."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        batch = len(self._workload.trajectories) // len(self._groups.plans)
        kind = VersionWindow if self._discipline.version_shares else OwnVersions
        self._placement = self._dispatcher = kind(math.ceil(batch / len(self._specs)))  # type: ignore[assignment]
        self._memory = {name: spec.tables.kv_capacity_tokens for name, spec in self._specs.items()}
        self._looks = False  # whether the next look is in the agenda
        self.num_handed_over = 0

    def _start(self, plans: Sequence[TrajectoryPlan]) -> None:
        super()._start(plans)
        self._look_later()

    def _look_later(self) -> None:
        if self._running and not self._looks:
            self._looks = True
            self.agenda.at(self.agenda.now_s + REPACK_S, self._look_again)

    def _look_again(self) -> None:
        self._looks = False
        self._repack()
        self._look_later()

    def _take_new_weights(self) -> None:
        """Engines take them when they have no trajectory; those in ramp-down make room for that."""
        self._repack()

    def _repack(self) -> None:
        held = {key: one.context_tokens for key, one in self._running.items()}
        for source, _ in self._placement.repack(held, self._memory):
            self.num_handed_over += 1
            self.hand_over(source)
            self._join(self._specs[source])

    def _set_home(self, one: SimulatedTrajectory, worker: str) -> None:
        if worker in self._placement.loads:
            self._placement.loads.discard(worker)
            self.running_engines[worker].load(self.agenda.now_s, self.options.load_s)
        version, oldest = self._placement.version_of(worker), self._groups.oldest.get(one.place)
        if oldest is None:
            self._first_generated(one.place, version)
        else:
            self._groups.oldest[one.place] = min(oldest, version)
        super()._set_home(one, worker)
