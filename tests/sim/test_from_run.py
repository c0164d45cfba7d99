"""A stored run as a workload: every turn with what its tools came to, and no call that was not made."""

from pathlib import Path

import numpy as np
import pytest
import zarr

from libra.config import config_from_dict
from libra.errors import StoreError
from libra.facts import (
    GroupCommitted,
    HomeChanged,
    Line,
    OpenBatch,
    OpenGate,
    StepFinished,
    VersionPublished,
    WorkerCapacity,
    WorkerWithdrawn,
)
from libra.hardware import engine_seconds
from libra.hardware.engine_tables import EngineTables
from libra.policy import Fifo
from libra.sim.from_run import host_pool, left_out, workload_of_run
from libra.sim.run_record import RunRecord
from libra.sim.simulation_options import Announced, fleet
from libra.sim.simulator import Simulator
from libra.store.trajectory_store import TrajectoryStore
from libra.types import NO_TOOL, EndReason, Prompt, ToolStatus, Trajectory, TrajectoryId


def lines_of(*facts):
    return tuple(Line("run", t_s, fact) for t_s, fact in facts)


def stored(run_dir, *turns):
    rows = [
        {"turn": i, "tool": tool, "status": status, "prompt_tokens": 10 * (i + 1), "generated_tokens": 3,
         "observation_tokens": 4 if status else 0, "tool_s": 0.5 if status else 0.0, "generate_s": 0.1}
        for i, (tool, status) in enumerate(turns)
    ]  # fmt: skip
    action, versions = np.array([False, True]), np.array([-1, 0], np.int32)
    trajectory = Trajectory(
        TrajectoryId(0, 0, 0), Prompt("p", ()), np.arange(2, dtype=np.int32), action, np.zeros(2, np.float32), versions,
        versions, rows, EndReason.MAX_TURNS,
    )  # fmt: skip
    run_dir.mkdir()
    with TrajectoryStore.create(run_dir / "trajectories.zarr") as store:
        store.append([trajectory], batch=0)
    return run_dir


def test_a_malformed_call_that_names_no_tool_ends_nothing_and_a_call_not_made_is_none(tmp_path):
    run_dir = stored(tmp_path / "run", ("add", "ok"), ("", "malformed"), ("add", "truncated"), ("add", ""))
    work = workload_of_run(run_dir)
    (plan,) = work.trajectories
    assert [(turn.tool, turn.status) for turn in plan.turns] == [
        ("add", ToolStatus.OK), ("", ToolStatus.MALFORMED), ("add", ToolStatus.TRUNCATED), ("", NO_TOOL),
    ]  # fmt: skip
    tables = {1: EngineTables(engine_seconds("A800-80G", "Qwen3-14B", 1))}
    outcome = Simulator(work, fleet({1: 1}, tables, {1: 2}), Fifo()).run()
    generated = [dispatch for dispatch in outcome.dispatched if dispatch.phase == "ROLLOUT"]
    assert len(generated) == 4


def test_a_stored_word_that_is_no_outcome_is_named_with_its_row(tmp_path):
    run_dir = stored(tmp_path / "run", ("add", "ok"), ("add", "error"))
    zarr.open_group(run_dir / "trajectories.zarr", mode="r+")["turn/status"][1] = "failure"  # as others may have it
    with pytest.raises(StoreError, match="row 1 of the turns"):
        workload_of_run(run_dir)


@pytest.mark.parametrize(("eta", "steps_s", "publish_s"), [(0, (5.0, 6.0), 0.0), (1, (4.0, 5.0), 1.0)])
def test_a_publication_beside_the_next_step_is_no_part_of_its_own(eta, steps_s, publish_s):
    lines = lines_of(
        (10.0, OpenBatch(0, (), "")), (14.0, StepFinished(0, 0.0, 0.0, beside=True)), (14.1, OpenBatch(1, (), "")),
        (15.0, VersionPublished(1)), (19.1, StepFinished(1, 0.0, 0.0, beside=True)), (20.1, VersionPublished(2)),
    )  # fmt: skip
    record = RunRecord(Path("run"), config_from_dict({"run": {"eta": eta}}), lines, (), 1)
    assert record.steps_s() == pytest.approx(steps_s) and record.publish_s() == pytest.approx(publish_s)


def test_a_streamed_step_is_measured_from_its_last_group_not_from_its_last_wave():
    done = [GroupCommitted("train", 0, group, 0, None, {}) for group in (0, 1)]
    lines = lines_of(
        (5.0, done[0]), (8.0, done[1]), (10.0, OpenBatch(0, ((0, 0), (0, 1)), "")), (12.0, VersionPublished(1)),
    )  # fmt: skip
    assert RunRecord(Path("run"), config_from_dict({}), lines, (), 1).steps_s() == pytest.approx((4.0,))


def test_absences_of_an_engine_are_read_with_the_iteration_that_had_begun():
    here = WorkerCapacity("e", rollout_slots=4)
    lines = lines_of(
        (1.0, here), (2.0, OpenGate(0, "")), (5.0, WorkerWithdrawn("e")), (8.0, OpenGate(1, "")), (9.0, here),
        (9.5, WorkerCapacity("another", rollout_slots=4)),
    )  # fmt: skip
    found = RunRecord(Path("run"), config_from_dict({}), lines, (), 1).announced("e")
    assert found == (Announced(0, 0.0, here), Announced(0, 3.0, WorkerWithdrawn("e")), Announced(1, 1.0, here))


def test_kv_of_hosts_has_the_size_and_the_seconds_of_the_runs_own_transfers():
    def record(*facts, **rollout):
        config = config_from_dict({"rollout": rollout})
        return RunRecord(Path("run"), config, lines_of(*((0.0, fact) for fact in facts)), (), 1)

    capacity = WorkerCapacity("rollout-0", kv_token_bytes=1024)
    moves = [
        HomeChanged("k", "a", "b", tokens, 0.0, 0.0, True, 0.01 + 1e-5 * tokens, 1024 * tokens, "")
        for tokens in (100, 300, 500)
    ]
    pool = host_pool(record(capacity, *moves, kv_host_gib=1.0))
    assert pool is not None and pool.capacity_tokens == 2**20
    assert (pool.latency_s, pool.token_s) == pytest.approx((0.01, 1e-5))
    unmeasured = host_pool(record(capacity, kv_host_gib=1.0))
    assert unmeasured is not None and unmeasured.latency_s == 0.0 < unmeasured.token_s
    assert host_pool(record(capacity, *moves)) is None
    assert host_pool(record(WorkerCapacity("rollout-0"), kv_host_gib=1.0)) is None


def test_parts_of_a_run_that_are_not_simulated_or_only_repeated_are_named():
    assert left_out(config_from_dict({})) == ""
    assert left_out(config_from_dict({"trainer": {"streaming": "on"}})).startswith("as in the run's log")
    kept = {"run": {"eta": 1}, "staleness": {"versions": "one"}}
    assert left_out(config_from_dict(kept)).startswith("not simulated: engines that keep a version")
