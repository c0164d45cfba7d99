"""A stored run as a workload: every turn with what its tools came to, and no call that was not made."""

from pathlib import Path

import numpy as np
import pytest
import zarr

from libra.config import config_from_dict
from libra.errors import StoreError
from libra.hardware import engine_seconds
from libra.hardware.engine_tables import EngineTables
from libra.policy import Fifo
from libra.sim import Simulator, fleet
from libra.sim.from_run import host_pool, left_out, workload_of_run
from libra.sim.run_record import RunRecord
from libra.store.trajectory_store import TrajectoryStore
from libra.types import NO_TOOL, EndReason, Prompt, ToolStatus, Trajectory, TrajectoryId


def stored(run_dir, *turns):
    """A run with one trajectory, its turns given as (tool, status)."""
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
    zarr.open_group(run_dir / "trajectories.zarr", mode="r+")["turn/status"][1] = (
        "failure"  # as another Libra may have it
    )
    with pytest.raises(StoreError, match="row 1 of the turns"):
        workload_of_run(run_dir)


@pytest.mark.parametrize(("eta", "steps_s", "publish_s"), [(0, (5.0, 6.0), 0.0), (1, (4.0, 5.0), 1.0)])
def test_a_publication_beside_the_next_step_is_no_part_of_its_own(eta, steps_s, publish_s):
    def at(t_s, name, **fields):
        return {"name": name, "t_s": t_s, **fields}

    events = (
        at(10.0, "batch_opened", batch=0), at(14.0, "step_finished", step=0, beside=True),
        at(14.1, "batch_opened", batch=1), at(15.0, "version_published", version=1),
        at(19.1, "step_finished", step=1, beside=True), at(20.1, "version_published", version=2),
    )  # fmt: skip
    record = RunRecord(Path("run"), config_from_dict({"run": {"eta": eta}}), events, (), 1)
    assert record.steps_s() == pytest.approx(steps_s) and record.publish_s() == pytest.approx(publish_s)


def test_kv_of_hosts_has_the_size_and_the_seconds_of_the_runs_own_transfers():
    def record(*events, **rollout):
        return RunRecord(Path("run"), config_from_dict({"rollout": rollout}), events, (), 1)

    capacity = {"name": "worker_capacity", "t_s": 0.0, "worker": "rollout-0", "kv_token_bytes": 1024}
    moves = [
        {"name": "home_changed", "t_s": 1.0, "sent": True, "num_bytes": 1024 * tokens, "tokens": tokens,
         "took_s": 0.01 + 1e-5 * tokens}
        for tokens in (100, 300, 500)
    ]  # fmt: skip
    pool = host_pool(record(capacity, *moves, kv_host_gib=1.0))
    assert pool is not None and pool.capacity_tokens == 2**20
    assert (pool.latency_s, pool.token_s) == pytest.approx((0.01, 1e-5))
    unmeasured = host_pool(record(capacity, kv_host_gib=1.0))
    assert unmeasured is not None and unmeasured.latency_s == 0.0 < unmeasured.token_s
    assert host_pool(record(capacity, *moves)) is None
    assert host_pool(record({**capacity, "kv_token_bytes": 0}, kv_host_gib=1.0)) is None


def test_parts_of_a_run_that_are_not_simulated_are_named():
    assert left_out(config_from_dict({})) == ""
    assert "trainer.streaming=on" in left_out(config_from_dict({"trainer": {"streaming": "on"}}))
