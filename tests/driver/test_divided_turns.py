"""Runs with `rollout.chunk_tokens` on real workers: the trajectories of the run without it, also after kills in mid-turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from libra.config import RunConfig
from libra.driver.session import Session
from libra.events import from_dict
from libra.policy.log_replay import replay
from libra.store.event_log import read_events

Config = Callable[..., RunConfig]

WORKERS = {"cluster": {"rollout_workers": 2}, "rollout": {"max_new_tokens": 30, "slots": 2, "max_context_tokens": 400}}


def content(directory: Path) -> dict[tuple[int, ...], dict[str, Any]]:
    """Tokens and turns of each training trajectory of a store."""
    group = zarr.open_group(directory / "trajectories.zarr", mode="r")
    levels = {
        name: {key: array[:] for key, array in part.arrays()}
        for name, part in (("token", group), ("turn", group["turn"]), ("trajectory", group["trajectory"]))
    }
    found = {}
    rows = levels["trajectory"]
    for row, split in enumerate(rows["split"]):
        if str(split) != "train":
            continue
        span = slice(rows["offset"][row], rows["offset"][row] + rows["length"][row])
        turns = slice(rows["turn_offset"][row], rows["turn_offset"][row] + rows["num_turns"][row])
        found[tuple(int(rows[name][row]) for name in ("iteration", "group", "sample"))] = {
            **{name: levels["token"][name][span] for name in ("token_ids", "behaviour_logprob", "weight_version")},
            **{
                name: levels["turn"][name][turns].tolist() for name in ("generated_tokens", "stop_reason", "text_chars")
            },
        }
    return found


def check_equal(whole: Path, parts: Path) -> None:
    """The same tokens and turns, and log-probabilities up to rounding."""
    expected, found = content(whole), content(parts)
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        for name, values in one.items():
            if name == "behaviour_logprob":
                assert np.abs(values - found[key][name]).max() < 1e-4, (key, name)
            else:
                assert np.array_equal(values, found[key][name]), (key, name)


def run_session(config: RunConfig) -> tuple[Path, list[dict[str, Any]]]:
    with Session(config) as session:
        for _ in session.iterations():
            pass
    return session.directory, list(read_events(session.directory / "events.jsonl").events)


def test_a_run_in_chunks_has_the_trajectories_of_the_run_without(make_config: Config) -> None:
    whole, _ = run_session(make_config(run={"name": "whole"}, **WORKERS))
    chunks = {**WORKERS, "rollout": {**WORKERS["rollout"], "chunk_tokens": 7}}
    parts, events = run_session(make_config(run={"name": "parts"}, **chunks))
    check_equal(whole, parts)
    finished = [event for event in events if event["name"] == "quantum_finished"]
    assert Counter(event["tokens"] for event in finished if event["phase"] == "ROLLOUT") == {7: 4 * 24, 2: 24}
    assert all(event["unfinished"] == (event["tokens"] == 7) for event in finished)
    waited = Counter(event["name"] for event in events)
    assert waited["quantum_continued"] and waited["quantum_dispatched"], "some had to leave their slot, and some not"
    told = list(replay((line, from_dict(event)) for line, event in enumerate(events, start=1)))
    assert len(told) > len(finished) and not [each.difference for each in told if each.difference]
