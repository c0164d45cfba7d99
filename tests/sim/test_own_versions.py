"""Engines with versions of their own, and orders and placements of other systems: who takes what, who hands over to whom."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libra.hardware.host_kv import HostPool
from libra.policy import Fifo, QuantumFinished, TrajectoryEnded, TrajectoryParked, VersionPublished, WorkerJoined
from libra.sim import EngineSpec, Simulator, Workload, synthetic
from libra.sim.dealt_groups import DealtGroups, apart
from libra.sim.disciplines import DISCIPLINES
from libra.sim.own_versions import REPACK_S, Handover, OwnVersions
from libra.sim.pipeline_options import PipelineOptions
from libra.sim.repacking_pipeline import RepackingPipeline
from libra.sim.seer_order import SeerOrder
from libra.sim.simulated_trajectory import SimulatedTrajectory
from libra.sim.training_gpus import group_work
from libra.sim.version_window import VersionWindow
from libra.types import NO_TOOL, Phase

Engines = Callable[..., tuple[EngineSpec, ...]]
Workloads = Callable[..., Workload]
OPTIONS = PipelineOptions(eta=1, core_gpus=1, close_s=0.0, load_s=0.25)
MEMORY = dict.fromkeys("abc", 1000)


def park(placement: OwnVersions, *keys: str) -> None:
    for key in keys:
        placement.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0, "0-0", "", 0))


def finish(placement: OwnVersions, *keys: str) -> None:
    for key in keys:
        placement.handle(QuantumFinished(key, Phase.ROLLOUT, 10, "", NO_TOOL, 1.0, 0))


def placed(placement: OwnVersions) -> list[tuple[str, str]]:
    return [(place.key, place.worker) for place in placement.dispatch(Phase.ROLLOUT)]


def test_an_engine_takes_its_share_and_a_new_version_when_it_is_empty() -> None:
    placement = OwnVersions(3)
    for worker in "ab":
        placement.handle(WorkerJoined(worker, rollout_slots=2))
    park(placement, *"123456789")
    assert placed(placement) == [("1", "a"), ("2", "a"), ("4", "b"), ("5", "b")]
    assert placement.num_waiting(Phase.ROLLOUT) == 5 and placement.residents("a") == 3 and not placement.loads
    placement.handle(VersionPublished(1))
    finish(placement, "1")
    placement.handle(TrajectoryEnded("1"))
    assert placed(placement) == [("3", "a")]  # the rest of its share, with the old version
    for key in "23":
        finish(placement, key)
        placement.handle(TrajectoryEnded(key))
    assert placed(placement) == [("7", "a"), ("8", "a")] and placement.loads == {"a"}
    assert (placement.version_of("a"), placement.version_of("b")) == (1, 0)
    finish(placement, "4")
    park(placement, "4")
    assert placed(placement) == [("6", "b")]  # which waited longer


def test_thin_engines_hand_over_to_the_fullest_of_their_version() -> None:
    placement = OwnVersions(2)
    for worker in "abc":
        placement.handle(WorkerJoined(worker, rollout_slots=4))
    park(placement, *"123456")
    placed(placement)
    held = {"1": 100, "2": 100, "3": 300, "4": 100, "5": 500, "6": 100}
    assert placement.repack(held, MEMORY) == ()  # nobody has less than before
    for key in "246":
        placement.handle(TrajectoryEnded(key))
    assert placement.repack(held, dict.fromkeys("abc", 450)) == (Handover("a", "b"),)  # c has no room left
    assert [placement.residents(worker) for worker in "abc"] == [0, 2, 1]
    assert placement.repack(held, MEMORY) == ()  # and b has more than before
    placement.handle(TrajectoryEnded("1"))
    assert placement.repack(held, MEMORY) == ()  # c has as much as before


class Watched(RepackingPipeline):
    """Notes the versions of each trajectory, and of each engine at any time."""

    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)
        self.versions: dict[str, set[int]] = {}

    def _set_home(self, one: SimulatedTrajectory, worker: str) -> None:
        super()._set_home(one, worker)
        self.versions.setdefault(one.key, set()).add(self._placement.version_of(worker))
        assert self._placement.version_of(worker) <= self._admission.version


@pytest.mark.parametrize("system", ["laminar", "dora"])
@given(seed=st.integers(0, 1000), count=st.integers(2, 4), slots=st.integers(1, 6), eta=st.integers(1, 2))
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_trajectory_has_one_version_and_batches_are_full(
    engines: Engines, system: str, seed: int, count: int, slots: int, eta: int
) -> None:
    work = synthetic(16, turns=3, seed=seed, iterations=10, group_size=4)
    each_s = {plan[:3]: 0.5 for plan in work.trajectories}
    options = replace(OPTIONS, eta=eta, num_steps=5, host=HostPool(200_000, 0.1, 1e6))
    pipeline = Watched(
        work, engines(count, slots=slots, kv=60_000), Fifo(), DISCIPLINES[system], group_work(each_s), options
    )
    found = pipeline.train()
    assert len(found.published_s) == 5 and all(len(versions) == 1 for versions in pipeline.versions.values())
    assert {version for versions in pipeline.versions.values() for version in versions} > {0}
    assert min(found.lags) >= 0 and max(found.lags) > 0
    assert sum(found.gpu_s.values()) == pytest.approx((count + 1) * found.published_s[-1])
    assert all(seconds >= -1e-6 for seconds in found.gpu_s.values())


def test_the_thin_end_is_handed_over_and_frees_engines_for_a_new_version(engines: Engines, workload: Workloads) -> None:
    # Two engines with a long and a short trajectory each: after the short ones both are thin.
    work = workload([(800, 0.0)], [(6000, 0.0)], [(800, 0.0)], [(6000, 0.0)], iterations=4)
    each_s = {plan[:3]: 0.1 for plan in work.trajectories}
    pipeline = Watched(
        work, engines(2, slots=4, kv=100_000), Fifo(), DISCIPLINES["laminar"], group_work(each_s),
        replace(OPTIONS, num_steps=1, load_s=0.0),
    )  # fmt: skip
    found = pipeline.train()
    assert pipeline.num_handed_over == 1
    again = sum(each.recomputed_tokens for _, each in pipeline._all_counters())
    # The short ones end between the first look and the second; one of the long ones goes on elsewhere then.
    assert again == pytest.approx(100 + (2 * REPACK_S - 0.2) / 0.0107, rel=0.05)
    assert found.lags == (0, 0, 0, 0)


MEMORY = dict.fromkeys("abcd", 1000)


def begun() -> VersionWindow:
    """Four engines of two slots with two trajectories of version 0 each, then version 1 with six more that wait."""
    placement = VersionWindow(2)
    for worker in "abcd":
        placement.handle(WorkerJoined(worker, rollout_slots=2))
    for key in "12345678":
        placement.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0, "0-0", "", 0))
    assert [place.worker for place in placement.dispatch(Phase.ROLLOUT)] == [*"aabbccdd"]
    placement.handle(VersionPublished(1))
    for key in "ABCDEF":
        placement.handle(TrajectoryParked(key, 1, Phase.ROLLOUT, 0, "1-0", "", 0))
    return placement


def ended(placement: VersionWindow, *keys: str) -> None:
    for key in keys:
        placement.handle(TrajectoryEnded(key))


def test_engines_above_the_share_of_their_version_are_emptied_and_take_the_newest() -> None:
    placement = begun()
    ended(placement, *"1234")  # one of version 0 is left on each engine: 4 x 4 / (4 + 6) engines are its share
    assert placement.repack(dict.fromkeys("5678", 100), MEMORY) == (Handover("a", "c"), Handover("b", "d"))
    assert [placement.residents(worker) for worker in "abcd"] == [0, 0, 2, 2]
    placed = placement.dispatch(Phase.ROLLOUT)
    assert [place.worker for place in placed if place.key in "ABCDEF"] == [*"aabb"]
    assert [placement.version_of(worker) for worker in "abcd"] == [1, 1, 0, 0] and placement.loads == {"a", "b"}
    assert placement.repack(dict.fromkeys("5678ABCD", 100), MEMORY) == ()


def test_nothing_is_handed_over_where_it_does_not_fit() -> None:
    placement = begun()
    assert placement.repack(dict.fromkeys("12345678", 100), MEMORY) == ()  # no slot is free
    ended(placement, *"1234")
    assert placement.repack(dict.fromkeys("5678", 100), dict.fromkeys("abcd", 150)) == ()  # no memory
    assert [placement.residents(worker) for worker in "abcd"] == [1, 1, 1, 1]


Engines = Callable[..., tuple[EngineSpec, ...]]
Workloads = Callable[..., Workload]


def test_whole_groups_are_dealt_in_turn_and_stay(engines: Engines, workload: Workloads) -> None:
    work = workload(*([(50, 0.0)] for _ in range(6)), group_size=2)
    specs = apart(engines(2), 6)
    simulator = Simulator(work, specs, DealtGroups([spec.name for spec in specs]))
    simulator.run()
    places = [(each.key.split("-")[3], each.worker, each.at_s) for each in simulator.record.dispatched]
    assert places == [(str(group), f"tp1-{group % 2}", 0.0) for group in (0, 0, 1, 1, 2, 2)]


def test_seers_order_has_probes_first_and_then_the_longest_groups(engines: Engines, workload: Workloads) -> None:
    lengths = (40, 41, 42, 200, 210, 220)
    work = workload(*([(tokens, 0.0)] for tokens in lengths), group_size=3)
    simulator = Simulator(work, engines(1, slots=1), SeerOrder())
    simulator.run()
    order = [tuple(each.key.split("-")[3:5]) for each in simulator.record.dispatched]
    # The first comes alone; the other probe is before the rest; then the longer group.
    assert order == [("0", "0"), ("1", "0"), ("1", "1"), ("1", "2"), ("0", "1"), ("0", "2")]
    again, kept = SeerOrder(), json.loads(json.dumps(simulator._ordering.snapshot()))
    again.restore(kept)
    assert again.snapshot() == kept
