"""A planner that really accepts a change, with everything on: vLLM, C-MLFQ, steps that overlap, weights from peer to peer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import zarr

from libra.config import RunConfig
from libra.driver.session import Session
from libra.rollout.vllm_settings import CPU_BLOCK_TOKENS, is_installed
from libra.store.event_log import read_events

Config = Callable[..., RunConfig]
GIB = 2**30
TOKEN_BYTES = 2 * 3 * 2 * 32 * 4
"""Keys and values of one token of tiny-arithmetic: layers, KV heads, head size, float32."""
KV_BLOCKS = 15
"""One more than the longest context takes, which vLLM keeps for itself."""
ITERATIONS = 7


@pytest.mark.skipif(not is_installed(), reason="vllm is not installed here: make setup-vllm")
@pytest.mark.timeout(1200)
def test_two_vllm_engines_become_one_when_the_planner_sees_memory_run_out(make_config: Config) -> None:
    """Nothing is set or faked here: one context more than an engine's KV holds is to come, and one engine of both holds it."""
    config = make_config(
        run={"iterations": ITERATIONS, "eta": 1},
        model={"path": "libra/tiny-arithmetic"},
        environment={
            "name": "libra.testing:GrowingPrompts",
            "args": {"stretch": 2, "first_chars": 140, "more_chars": 45, "most_chars": 320},
        },
        rollout={"engine": "vllm", "slots": 1, "max_new_tokens": 4, "max_turns": 2, "max_context_tokens": 416},
        vllm={"kv_cache_gib": KV_BLOCKS * CPU_BLOCK_TOKENS * TOKEN_BYTES / GIB},
        trainer={"prompts": 2, "group_size": 2, "lr": 1e-3},
        cluster={"rollout_workers": 2, "hybrid_workers": 2},
        weights={"transfer": "peer"},
        planner={"replan": True, "apply": True, "change_cost_s": 1.0},
    )
    assert config.policy.name == "cmlfq"
    with Session(config) as session:
        rows = list(session.iterations())
        has = {row["worker"]: (row["role"], row["tp"]) for row in session.roles.rows()}
    events = list(read_events(session.directory / "events.jsonl").events)

    def named(name: str) -> list[dict[str, object]]:
        return [event for event in events if event["name"] == name]

    contexts = [row["tokens"] / row["trajectories"] for row in rows]
    declared = {(event["worker"], event["tp"]): event["kv_tokens"] for event in named("engine_declared")}
    kv_tokens = int(str(declared["rollout-0", 1]))
    assert declared["rollout-1", 1] == kv_tokens <= KV_BLOCKS * CPU_BLOCK_TOKENS
    assert int(str(declared["rollout-0", 2])) >= 2 * kv_tokens
    accepted = named("plan_accepted")[0]
    assert "Rebucket" in [name for name, _ in accepted["commands"]]  # type: ignore[attr-defined]
    (considered,) = [e for e in named("plan_considered") if e["iteration"] == accepted["iteration"]]
    assert str(considered["reason"]).startswith("KV memory: 2 x TP 1 of 1 slots would need")
    changed = [(e["worker"], e["from_tp"], e["to_role"], e["to_tp"]) for e in named("role_changed")]
    assert sorted(changed) == [("rollout-0", 1, "rollout", 2), ("rollout-1", 1, "lent", 1)]
    assert has == {"rollout-0": ("rollout", 2), "rollout-1": ("lent", 1)}
    realised = named("plan_realised")
    assert realised and realised[0]["iteration"] == accepted["iteration"] and float(str(realised[0]["cost_s"])) > 0
    assert max(contexts) > 0.75 * kv_tokens, "what was foreseen came"

    assert [row["iteration"] for row in rows] == list(range(ITERATIONS))
    assert [event["batch"] for event in named("batch_opened")] == list(range(ITERATIONS))
    members = [tuple(member) for event in named("batch_opened") for member in event["members"]]  # type: ignore[attr-defined]
    assert len(members) == len(set(members)) == 2 * ITERATIONS, "every group is consumed once"
    columns = zarr.open_group(session.directory / "trajectories.zarr", mode="r")["trajectory"]
    ids = Counter(zip(*(columns[name][:].tolist() for name in ("iteration", "group", "sample")), strict=True))
    assert set(ids.values()) == {1} and len(ids) >= 4 * ITERATIONS
    assert not named("engine_quarantined") and not named("role_change_failed")
    assert not [event for event in named("plan_blocked") if "slots on an engine" not in str(event["missing"])]
    assert all(row["lag_max"] <= 1 for row in rows)
