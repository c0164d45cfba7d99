"""Runs with `rollout.chunk_tokens` on real workers: the trajectories of the run without it, also after kills in mid-turn."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import mid_turn_kill
import numpy as np
import pytest
import zarr

from libra.cli.replay_text import event_text
from libra.cluster.present_workers import present_workers
from libra.config import RunConfig, config_from_dict, dump_config
from libra.driver.session import Session
from libra.events import from_dict
from libra.observe.run_facts import RunFacts
from libra.policy.log_replay import replay
from libra.store.event_log import read_events
from libra.store.trajectory_journal import Journal

PART = 7


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


def run_session(config: RunConfig, **given: Any) -> tuple[Path, list[dict[str, Any]]]:
    with Session(config, **given) as session:
        for _ in session.iterations():
            pass
    return session.directory, list(read_events(session.directory / "events.jsonl").events)


@pytest.fixture(scope="module")
def whole(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without chunks."""
    return run_session(configured(random_model, tmp_path_factory.mktemp("whole")))[0]


def configured(model: Path, directory: Path, chunk_tokens: int | None = None) -> RunConfig:
    return config_from_dict({
        "run": {"name": "demo", "dir": str(directory), "iterations": 2},
        "model": {"path": str(model)},
        "environment": {"name": "libra.testing:FixedTurns"},
        "rollout": {
            "max_new_tokens": 30, "max_turns": 3, "ignore_eos": True, "slots": 2, "max_context_tokens": 400,
            "chunk_tokens": chunk_tokens,
        },
        "trainer": {"prompts": 2, "group_size": 2, "lr": 1e-3},
        "cluster": {"threads": 1, "dashboard_port": 0, "rollout_workers": 2},
        "observe": {"progress": False, "tensorboard": False},
        "store": {"keep_journals": True},
    })  # fmt: skip


def test_a_run_in_chunks_has_the_trajectories_of_the_run_without(
    whole: Path, random_model: Path, tmp_path: Path
) -> None:
    parts, events = run_session(configured(random_model, tmp_path, PART))
    check_equal(whole, parts)
    finished = [event for event in events if event["name"] == "quantum_finished"]
    assert Counter(event["tokens"] for event in finished if event["phase"] == "ROLLOUT") == {7: 4 * 24, 2: 24}
    assert all(event["unfinished"] == (event["tokens"] == 7) for event in finished)
    facts = RunFacts()
    for event in events:
        facts.add(from_dict(event))
    assert (facts.quanta["ROLLOUT"], facts.parts) == (5 * 24, 4 * 24)
    assert sum("; the turn goes on" in event_text(from_dict(event)) for event in finished) == facts.parts
    waited = Counter(event["name"] for event in events)
    assert waited["quantum_continued"] and waited["quantum_dispatched"], "some had to leave their slot, and some not"
    told = list(replay((line, from_dict(event)) for line, event in enumerate(events, start=1)))
    assert len(told) > len(finished) and not [each.difference for each in told if each.difference]


def check_records(directory: Path, events: list[dict[str, Any]]) -> None:
    """Each quantum has one record and one report, and parts add up to turns of 30 tokens."""
    reported = Counter((event["key"], event["quantum"]) for event in events if event["name"] == "quantum_finished")
    assert set(reported.values()) == {1}
    journal = Journal(directory / "journal")
    names = journal.trajectories()
    assert len(names) == 8
    for name in names:
        parts = [(r["turn"], len(r["token_ids"])) for r in journal.read(name) if r["kind"] == "generation"]
        assert parts == [(turn, tokens) for turn in range(3) for tokens in (7, 7, 7, 7, 2)]


@pytest.mark.parametrize("after", [True, False])
def test_a_worker_killed_in_mid_turn_costs_at_most_a_part(
    after: bool, whole: Path, random_model: Path, tmp_path: Path
) -> None:
    with Session(configured(random_model, tmp_path, PART)) as session:
        found = present_workers(session.client)
        rollout = [address for address, worker in found.items() if worker["name"].startswith("rollout")]
        kill = partial(mid_turn_kill.kill_at_part, after=after)
        session.client.run(kill, "demo", tmp_path / "killed", None, workers=rollout)
        for _ in session.iterations():
            pass
    assert (tmp_path / "killed").exists()
    events = list(read_events(session.directory / "events.jsonl").events)
    assert any(event["name"] == "quantum_lost" for event in events)
    check_equal(whole, session.directory)
    check_records(session.directory, events)


def test_a_driver_killed_in_mid_turn_goes_on_from_the_part(whole: Path, random_model: Path, tmp_path: Path) -> None:
    config = configured(random_model, tmp_path, PART)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    script = [sys.executable, mid_turn_kill.__file__, str(tmp_path / "config.yaml"), str(tmp_path / "killed")]
    driver = subprocess.run(script, check=False, capture_output=True, text=True)
    assert driver.returncode == -signal.SIGKILL, driver.stderr
    journal, victim = Journal(tmp_path / "demo" / "journal"), (tmp_path / "killed").read_text()
    (*_, last) = left = journal.read(victim)
    assert (len(left) - 1, last["turn"], last["stop_reason"]) == (mid_turn_kill.AT, 0, "parked")
    directory, events = run_session(config, resume=True)
    check_equal(whole, directory)
    check_records(directory, events)
    assert [record["epoch"] for record in journal.read(victim)] == [0] * len(left) + [1] * (17 - len(left))
