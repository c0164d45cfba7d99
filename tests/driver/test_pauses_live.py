"""With KV that moves, only memory makes trajectories wait to begin, and those with most left go first, on real worker processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from traced_lengths import ARGS, GROUP_SIZE, GROUPS, MAX_NEW_TOKENS

from libra.cli.replay import replay_run
from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict
from libra.driver.session import Session
from libra.events import from_dict
from libra.policy.fleet import Fleet
from libra.policy.messages import QuantumStarted
from libra.policy.replayed_objects import policy_event
from libra.rollout.engine_capacity import kv_token_bytes
from libra.store.event_log import read_events
from libra.types import Phase

pytestmark = pytest.mark.timeout(600)

SLOTS, ITERATIONS = 2, 2
KV_TOKENS = 1536
"""Of each of two engines: contexts end with 300 to 1,000 tokens, so that those of the four slots fit, and those of all twelve
trajectories of an iteration do not."""


def config_of(model: Path, directory: Path, token_bytes: int) -> RunConfig:
    return config_from_dict({
        "run": {"name": "kv", "dir": str(directory), "iterations": ITERATIONS},
        "model": {"path": str(model)},
        "environment": {"name": "libra.testing:TraceTurns", "args": ARGS},
        "policy": {"name": "traced_lengths:TracedLengths"},
        "rollout": {
            "slots": SLOTS, "max_context_tokens": 1024, "max_turns": 64, "ignore_eos": True, "max_new_tokens": MAX_NEW_TOKENS,
            "kv_cache_gib": (KV_TOKENS + 0.5) * token_bytes / 2**30, "kv_host_gib": 0.25,
        },
        "trainer": {
            "prompts": GROUPS, "group_size": GROUP_SIZE, "lr": 0.0, "micro_batch_tokens": 4096, "max_row_tokens": 1024,
        },
        "evaluation": {"prompts": 0}, "checkpoint": {"every": 0}, "observe": {"progress": False, "tensorboard": False},
        "cluster": {"dashboard_port": 0, "threads": 1, "engines": [{"threads": 1}, {"threads": 1}]},
    })  # fmt: skip


class Watched:
    """Contexts and homes as the log shows them, line by line."""

    def __init__(self, kv_tokens: int) -> None:
        self.kv_tokens = kv_tokens
        self.context: dict[str, int] = {}
        self.home: dict[str, str] = {}
        self.most_under_way = 0
        self.fleet = Fleet()
        self.began: list[float] = []
        """Of each placement of one without a home, the share taken then of what may be under way there: at least that much."""
        self.waiting: dict[str, tuple[tuple[int, ...], str]] = {}
        """Priority of those that wait to generate, with its reason, in the order in which they were parked."""
        self.dropped: set[str] = set()
        """Those whose engine was too full: it may have dropped their KV, and they wait for any engine with room."""
        self.passed_over: list[str] = []
        """Reasons of placements at home that passed over a trajectory that had waited there for longer."""
        self.wrong: list[str] = []
        """Placements at home while another trajectory waited there with a better priority."""

    def add(self, line: int, event: Mapping[str, Any]) -> None:
        key = event.get("key", "")
        told = policy_event(line, from_dict(event), "")
        if told is not None:
            self.fleet.handle(told)
        match event["name"]:
            case "trajectory_parked" if event["context_tokens"]:
                self.context[key] = event["context_tokens"]
                self.parked(key, event)
            case "trajectory_parked":
                self.parked(key, event)
            case "priority_set" if key in self.waiting:
                self.waiting[key] = tuple(event["priority"]), event["reason"]
            case "quantum_dispatched" if event["phase"] == "ROLLOUT":
                self.dispatched(key, event)
            case "quantum_finished":
                self.context[key] = self.context.get(key, 0) + event["tokens"] + event["payload_tokens"]
                if key in self.home and self.taken(self.home[key]) > 1.0:
                    self.dropped |= {other for other, home in self.home.items() if home == self.home[key]}
            case "trajectory_ended":
                for table in (self.home, self.context, self.waiting):
                    table.pop(key, None)

    def parked(self, key: str, event: Mapping[str, Any]) -> None:
        if event["phase"] == "ROLLOUT":
            self.waiting[key] = tuple(event["priority"]), event["reason"]

    def dispatched(self, key: str, event: Mapping[str, Any]) -> None:
        worker, (priority, why), earlier = event["worker"], self.waiting[key], list(self.waiting).index(key)
        if event["reason"] == "home":
            there = [
                other
                for other in self.waiting
                if other != key and self.home.get(other) == worker and other not in self.dropped
            ]
            self.wrong += [f"{key} before {other}" for other in there if self.waiting[other][0] < priority]
            if any(list(self.waiting).index(other) < earlier for other in there):
                self.passed_over.append(why)
        del self.waiting[key]
        self.dropped.discard(key)
        self.home[key] = worker
        self.most_under_way = max(self.most_under_way, len(self.home))
        if event["reason"].startswith("first home"):
            self.began.append(self.taken(worker) * self.kv_tokens / self.fleet.hosts[worker].open_tokens)
        self.fleet.handle(QuantumStarted(key, Phase.ROLLOUT, worker))

    def taken(self, worker: str) -> float:
        there = [key for key, home in self.home.items() if home == worker and key not in self.dropped]
        return sum(self.context.get(key, 0) for key in there) / self.kv_tokens


def test_memory_decides_who_waits_and_octaves_of_tokens_left_who_goes_first(random_model: Path, tmp_path: Path) -> None:
    token_bytes = kv_token_bytes(json.loads((random_model / "config.json").read_text()), "float32")
    config = config_of(random_model, tmp_path, token_bytes)
    with (
        local_cluster(config) as cluster,
        Client(cluster) as client,
        Session(config, client=client) as session,
    ):
        assert len(list(session.iterations())) == ITERATIONS
        directory = session.directory
    log = list(read_events(directory / "events.jsonl").events)
    seen = Watched(KV_TOKENS)
    for line, event in enumerate(log):
        seen.add(line, event)
    assert (KV_TOKENS, token_bytes) in {
        (event["kv_tokens"], event["kv_token_bytes"]) for event in log if event["name"] == "worker_capacity"
    }
    assert seen.most_under_way > 2 * SLOTS + 1, "who has begun does not go first: all begin as far as memory allows"
    assert len(seen.began) > ITERATIONS * GROUPS * GROUP_SIZE, "no engine was too full, so that nothing waited for room"
    assert max(seen.began) <= 1.0, "one began, or went on elsewhere, without room for what the others hold"
    assert not seen.wrong
    assert seen.passed_over and all(why.startswith("cmlfq: octave") for why in seen.passed_over)
    assert [event for event in log if event["name"] == "home_changed" and event["num_bytes"]], "KV stayed where it was"
    assert replay_run(directory, from_snapshot=False, keys=(), decisions=(), as_json=True)
