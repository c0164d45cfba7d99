"""Engines with versions of their own: who takes what, who hands over to whom."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.draws import synthetic
from benchmarks.systems.disciplines import DISCIPLINES
from benchmarks.systems.own_versions import Handover, OwnVersions
from benchmarks.systems.pipeline_options import PipelineOptions
from benchmarks.systems.repacking_pipeline import RepackingPipeline
from benchmarks.systems.training_gpus import group_work
from benchmarks.systems.version_window import VersionWindow
from libra.facts import QuantumFinished, TrajectoryEnded, TrajectoryParked, VersionPublished, WorkerCapacity
from libra.hardware.engine_tables import HostPool
from libra.policy import Fifo
from libra.types import NO_TOOL, Phase

OPTIONS = PipelineOptions(eta=1, core_gpus=1, close_s=0.0, load_s=0.25)


def park(placement, *keys):
    for key in keys:
        placement.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0, "0-0", "", 0))


def finish(placement, key):
    placement.handle(QuantumFinished(key, Phase.ROLLOUT, 10, "", NO_TOOL, 1.0, 0))


def placed(placement):
    return [(place.key, place.worker) for place in placement.dispatch(Phase.ROLLOUT)]


def test_an_engine_takes_its_share_and_a_new_version_when_it_is_empty():
    placement = OwnVersions(3)
    for worker in "ab":
        placement.handle(WorkerCapacity(worker, rollout_slots=2))
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


class Watched(RepackingPipeline):
    """Notes the versions of each trajectory, and of each engine at any time."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.versions = {}

    def _set_home(self, one, worker):
        super()._set_home(one, worker)
        self.versions.setdefault(one.key, set()).add(self._placement.version_of(worker))
        assert self._placement.version_of(worker) <= self._admission.version


@pytest.mark.parametrize("system", ["laminar", "dora"])
@given(seed=st.integers(0, 1000), count=st.integers(2, 4), slots=st.integers(1, 6), eta=st.integers(1, 2))
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_trajectory_has_one_version_and_batches_are_full(engines, system, seed, count, slots, eta):
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


def test_engines_above_the_share_of_their_version_are_emptied_and_take_the_newest():
    placement, memory = VersionWindow(2), dict.fromkeys("abcd", 1000)
    for worker in "abcd":
        placement.handle(WorkerCapacity(worker, rollout_slots=2))
    park(placement, *"12345678")
    assert [place.worker for place in placement.dispatch(Phase.ROLLOUT)] == [*"aabbccdd"]
    placement.handle(VersionPublished(1))
    for key in "ABCDEF":
        placement.handle(TrajectoryParked(key, 1, Phase.ROLLOUT, 0, "1-0", "", 0))
    for key in "1234":
        placement.handle(TrajectoryEnded(key))
    # one of version 0 is left on each engine: 4 x 4 / (4 + 6) engines are its share
    assert placement.repack(dict.fromkeys("5678", 100), memory) == (Handover("a", "c"), Handover("b", "d"))
    assert [placement.residents(worker) for worker in "abcd"] == [0, 0, 2, 2]
    placed = placement.dispatch(Phase.ROLLOUT)
    assert [place.worker for place in placed if place.key in "ABCDEF"] == [*"aabb"]
    assert [placement.version_of(worker) for worker in "abcd"] == [1, 1, 0, 0] and placement.loads == {"a", "b"}
    assert placement.repack(dict.fromkeys("5678ABCD", 100), memory) == ()
