"""Contexts grow over a run, and its engines use fewer slots before the iteration that would not fit into their KV memory."""

import pytest
from whole_run import named, once_each

from libra.cli.replay import replay_run
from libra.config.resume_changes import load_resumed
from libra.driver.session import Session

TOKEN_BYTES = 2 * 2 * 1 * 16 * 4
"""Keys and values of the random model: layers, KV heads, head size, float32."""
KV_TOKENS = 2600
PROMPTS, GROUP, ITERATIONS = 2, 4, 7


@pytest.mark.timeout(900)
def test_slots_are_fewer_before_the_iteration_that_would_not_fit_also_after_a_stop(make_config, client):
    growing = {"stretch": 2, "first_chars": 40, "more_chars": 20}
    config = make_config(
        run={"iterations": ITERATIONS}, environment={"name": "libra.testing:GrowingPrompts", "args": growing},
        rollout={"max_turns": 2, "kv_cache_gib": KV_TOKENS * TOKEN_BYTES / 2**30}, trainer={"prompts": PROMPTS,
        "group_size": GROUP}, planner={"replan": True, "apply": True}, policy={"boundaries_tokens": {"tp1": 50.0}},
        checkpoint={"every": 1},
    )  # fmt: skip
    with Session(config, client=client) as session:
        iterations = session.iterations()
        rows = [next(iterations) for _ in range(5)]
        session.engines.set_boundaries({"tp1": 70.0}, "a test")
        assert session.engines.rows()[0]["supplies"] < 8
    directory = session.directory
    with Session(load_resumed(directory), client=client, resume=True) as session:
        assert session.engines.rows()[0]["supplies"] < 8
        rows += [row for row in session.iterations() if row["iteration"] >= 5]
    contexts = [row["tokens"] / row["trajectories"] for row in rows]
    assert contexts == sorted(contexts) and len(contexts) == ITERATIONS
    assert 8 * contexts[-1] > KV_TOKENS > 8 * contexts[0], "all eight slots fit at first, and would not in the end"

    events = once_each(directory, ITERATIONS, PROMPTS, GROUP)
    assert named(events, "engine_declared")[0]["kv_tokens"] == KV_TOKENS
    accepted = named(events, "plan_accepted")[0]
    assert [name for name, _ in accepted["commands"]] == ["SetConcurrency"]
    (why,) = {e["reason"] for e in named(events, "plan_considered") if e["iteration"] == accepted["iteration"]}
    assert why.startswith("KV memory")
    slots, used = 8, dict.fromkeys(range(ITERATIONS), 8)
    for event in named(events, "run_started", "slots_set", "quantum_dispatched"):
        slots = 8 if event["name"] == "run_started" else event.get("slots", slots)
        if event["name"] == "quantum_dispatched" and event["key"].startswith("trajectory-train"):
            used[int(event["key"].split("-")[2])] = slots
    assert all(used[k] * context <= KV_TOKENS for k, context in enumerate(contexts)), (used, contexts)
    assert not named(events, "worker_lost", "plan_blocked")
    starts = [n for n, event in enumerate(events) if event["name"] == "run_started"]
    again = [event["name"] for event in events[starts[1] :]]
    assert again.index("slots_set") < again.index("quantum_dispatched")
    assert [dict(event["boundaries"]) for event in named(events, "boundaries_set")] == [{1: 50.0}, {1: 70.0}, {1: 50.0}]
    assert replay_run(directory, from_snapshot=False, keys=(), decisions=(), as_json=True)
