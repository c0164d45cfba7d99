"""A scheduler in this process, made-up snapshots, and one run that was recorded."""

import platform

import pytest
from made_events import an_iteration

import factories
from libra import facts

platform.processor()  # once in a process it starts `uname -p`, which no test is to be blamed for: Dask's clients ask


@pytest.fixture
def live_scheduler():
    """Opens a scheduler on this event loop, its dashboard at a free port: ``async with live_scheduler()``."""
    from distributed import Scheduler

    def start(**kwargs):
        return Scheduler(**{"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0", **kwargs})

    return start


@pytest.fixture
def make_snapshot():
    """A snapshot of a run in its fourth iteration of six; keyword arguments replace entries."""

    def make(**changes):
        def row(i):
            queued = max(0, 40 - i // 2)
            return (0.5 * i, queued, i % 7, min(16, i), 1 + i % 4, 37 * i, 0, queued // 2, queued - queued // 2, 0, 0)

        history = [row(i) for i in range(120)]
        return {
            "run": "demo", "epoch": 1, "uptime_s": 60.0, "eta": 1, "iterations": 6, "iteration": 3,
            "state": "running", "left_s": 95.5, "evaluations": [[0, 0.25, 64], [2, 0.5, 64]],
            "steps": [[0, {"trajectories": 9.0, "training": 1.5}], [1, {"trajectories": 6.0, "training": 1.5, "moving": 0.5}]],
            "decisions": [[42.5, "iteration 3 may generate", "version 3 >= 3 - eta 1"]],
            "versions": {"published": 3, "served": {"rollout-0": 3, "rollout-1": 2}},
            "slots": {"ROLLOUT": {"used": 14, "total": 16}, "TOOL": {"used": 3, "total": 8}},
            "queue": {"ROLLOUT": {0: 21, 1: 9, 3: 2}, "TOOL": {0: 5}},
            "buckets": [
                {"bucket": "tp1", "engines": 2, "used": 8, "slots": 8, "at_home": 19, "waiting": 11, "left_tokens": 310},
                {"bucket": "tp4", "engines": 1, "used": 6, "slots": 8, "at_home": 9, "waiting": 3, "left_tokens": 2210},
                {"bucket": None, "engines": 0, "used": 0, "slots": 0, "at_home": 0, "waiting": 18, "left_tokens": 0},
            ],
            "policy": {
                "name": "cmlfq", "objective": "makespan", "skill": 0.214, "weights": {"joint": 0.41, "totals": 0.0},
                "outcomes": [[500, 800, 900], [510, 300, 250], [0, 40, 70]],
            },
            "quanta": {"ROLLOUT": 1517, "TOOL": 1203}, "parts": 0, "tokens": 4403, "groups": 23,
            "failures": {"none": 180, "tool": 3, "worker": 1},
            "rewards": [[0, 0.28125], [1, 0.40625], [2, 0.5625]], "lag": [[0, 0.0], [1, 0.5], [2, 0.75]],
            "history": history, "roles": [], "not_ready": [],
            "time": {
                "until_s": 60.0, "busy_frac": 0.625, "now_busy_frac": 0.75,
                "shares": {"generating": 0.5, "training": 0.125, "tail": 0.375},
                "now_shares": {"generating": 0.75, "tail": 0.25},
                "workers": [
                    {"worker": "rollout-0", "kind": "engine", "state": "tail", "busy_frac": 0.5, "slots_used_frac": 0.25,
                     "seconds": {"generating": 30.0, "tail": 30.0}}
                ],
            },
        } | changes  # fmt: skip

    return make


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory, random_model, client):
    """The directory of a short run that has finished: two iterations, held-out questions, tools. Read it only."""
    from libra.config import config_from_dict
    from libra.driver.run_session import run

    settings = factories.run_settings(
        tmp_path_factory.mktemp("recorded"), random_model,
        run={"name": "recorded"}, evaluation={"prompts": 4}, observe={"trackers": ["tensorboard"]},
    )  # fmt: skip
    return run(config_from_dict(settings), client=client).directory


@pytest.fixture
def made_run(tmp_path):
    """The directory of a run whose log is `made_events.an_iteration`."""
    run = tmp_path / "made"
    run.mkdir()
    (run / "config.resolved.yaml").write_text("run: {name: made, iterations: 2}\n")
    (run / "metrics.jsonl").write_text('{"step": 0, "wall_time_s": 40.0, "reward": 0.5}\n')
    (run / "events.jsonl").write_text("".join(facts.to_json(event) + "\n" for event in an_iteration()))
    return run
