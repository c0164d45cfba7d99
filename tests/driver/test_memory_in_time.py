"""Contexts grow over a run, and what its engines do is changed before the iteration that would not fit into their KV memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import zarr

from libra.cli.replay import replay_run
from libra.config import RunConfig
from libra.config.resume_changes import load_resumed
from libra.driver.session import Session
from libra.store.event_log import read_events

pytestmark = pytest.mark.timeout(900)

Config = Callable[..., RunConfig]
GIB = 2**30
TOKEN_BYTES = 2 * 2 * 1 * 16 * 4
"""Keys and values of the random model: layers, KV heads, head size, float32."""
KV_TOKENS = 2600


def events_of(session: Session) -> list[dict[str, Any]]:
    return list(read_events(session.directory / "events.jsonl").events)


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] == name]


def growing(make_config: Config, iterations: int, **planner: Any) -> RunConfig:
    return make_config(
        run={"iterations": iterations},
        environment={
            "name": "libra.testing:GrowingPrompts",
            "args": {"stretch": 2, "first_chars": 40, "more_chars": 20},
        },
        rollout={"slots": 8, "max_new_tokens": 4, "max_turns": 2, "kv_cache_gib": KV_TOKENS * TOKEN_BYTES / GIB},
        trainer={"prompts": 2, "group_size": 4},
        planner={"replan": True, "apply": True, **planner},
        checkpoint={"every": 1},
    )


def test_slots_are_fewer_before_the_iteration_that_would_not_fit(
    make_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "libra.driver.replanning"), Session(growing(make_config, 7)) as session:
        rows = list(session.iterations())
        assert session.engines.rows()[0]["supplies"] < 8
    events, contexts = events_of(session), [row["tokens"] / row["trajectories"] for row in rows]
    assert contexts == sorted(contexts)
    assert 8 * contexts[-1] > KV_TOKENS > 8 * contexts[0], "all eight slots fit at first, and would not in the end"
    assert named(events, "engine_declared")[0]["kv_tokens"] == KV_TOKENS

    first = named(events, "plan_accepted")[0]
    assert [name for name, _ in first["commands"]] == ["SetConcurrency"]
    (reason,) = {
        event["reason"] for event in named(events, "plan_considered") if event["iteration"] == first["iteration"]
    }
    assert reason.startswith("KV memory: 1 x TP 1 of 8 slots would need") and "tokens of context expected" in reason
    assert reason in caplog.text
    limits = {event["t_s"]: event["slots"] for event in named(events, "slots_set")}
    ends = {event["iteration"]: event["t_s"] for event in named(events, "iteration_finished")}
    for k, mean in enumerate(contexts):
        begun_s = ends[k - 1] if k else 0.0
        slots = next((has for at_s, has in reversed(limits.items()) if at_s <= begun_s + 0.5), 8)
        assert slots * mean <= KV_TOKENS, f"iteration {k}: {slots} slots of {mean} tokens"
    told = [(event["worker"], event["rollout_slots"]) for event in named(events, "worker_capacity")]
    assert told[0] == ("rollout-0", 8) and told[-1] == ("rollout-0", list(limits.values())[-1])
    assert not named(events, "worker_lost") and not named(events, "plan_blocked")
    columns = zarr.open_group(session.directory / "trajectories.zarr", mode="r")["trajectory"]
    ids = list(zip(*(columns[name][:].tolist() for name in ("iteration", "group", "sample")), strict=True))
    assert sorted(ids) == [(k, g, s) for k in range(7) for g in range(2) for s in range(4)]
    assert replay_run(session.directory, from_snapshot=False, keys=(), decisions=(), as_json=True)


def test_without_apply_it_is_said_and_not_done(make_config: Config) -> None:
    with Session(growing(make_config, 5, apply=False)) as session:
        list(session.iterations())
        assert session.engines.rows()[0]["supplies"] == 8
    events = events_of(session)
    assert named(events, "plan_accepted") and not named(events, "slots_set")


def test_a_resumed_run_begins_as_configured_and_makes_room_before_its_first_iteration(make_config: Config) -> None:
    config = growing(make_config, 7)
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"boundaries_tokens": {"tp1": 50.0}})})
    with Session(config) as session:
        iterations = session.iterations()
        for _ in range(5):
            next(iterations)
        session.engines.set_boundaries({"tp1": 70.0}, "a test")
        changed = session.engines.rows()[0]["supplies"]
        assert changed < 8
    with Session(load_resumed(session.directory), resume=True) as resumed:
        assert resumed.first >= 4
        rows = resumed.engines.rows()
        assert (rows[0]["slots"], rows[0]["supplies"] < 8) == (8, True)
        list(resumed.iterations())
    events = events_of(resumed)
    starts = [n for n, event in enumerate(events) if event["name"] == "run_started"]
    again = events[starts[1] :]
    assert next(event["rollout_slots"] for event in again if event["name"] == "worker_capacity") == 8
    assert [dict(event["boundaries"]) for event in named(events, "boundaries_set")] == [{1: 50.0}, {1: 70.0}, {1: 50.0}]
    limited = next(n for n, event in enumerate(again) if event["name"] == "slots_set")
    dispatched = next(n for n, event in enumerate(again) if event["name"] == "quantum_dispatched")
    assert again[limited]["reason"].startswith("KV memory")
    assert limited < dispatched
