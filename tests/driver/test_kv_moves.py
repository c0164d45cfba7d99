"""Trajectories that change their home take their KV along, between real worker processes, and generate the same tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from libra.cli.replay import replay_run
from libra.cluster.local import local_cluster
from libra.config import RunConfig, config_from_dict
from libra.driver.session import Session
from libra.store.event_log import read_events
from libra.store.group_records import read_group

pytestmark = pytest.mark.timeout(600)

TRACES = Path(__file__).parents[2] / "benchmarks" / "data" / "agent_turns" / "tau_airline_gpt4o.csv"
LAYERS, KV_HEADS, HEAD_DIM = 6, 1, 16
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4


@pytest.fixture(scope="module")
def slow_model(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with little KV and much to compute: it pays to send KV."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("slow") / "model"
    shutil.copytree(random_model, directory)
    config = Qwen3Config.from_pretrained(random_model)
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": LAYERS, "layer_types": None}
    torch.manual_seed(1)
    Qwen3ForCausalLM(Qwen3Config(**(config.to_dict() | shape))).save_pretrained(directory)
    return directory


def config_of(model: Path, directory: Path, name: str, **rollout: Any) -> RunConfig:
    args = {
        "path": str(TRACES), "groups": 3, "group_size": 4, "tokens_frac": 0.05, "payload_frac": 0.3, "tool_frac": 0.0,
    }  # fmt: skip
    return config_from_dict(
        {
            "run": {"name": name, "dir": str(directory), "iterations": 2},
            "model": {"path": str(model)},
            "environment": {"name": "libra.testing:TraceTurns", "args": args},
            "rollout": {
                "slots": 2,
                "max_context_tokens": 1024,
                "max_turns": 64,
                "ignore_eos": True,
                "max_new_tokens": 64,
            }
            | rollout,
            "trainer": {"prompts": 3, "group_size": 4, "lr": 0.0, "micro_batch_tokens": 4096, "max_row_tokens": 1024},
            "evaluation": {"prompts": 0},
            "checkpoint": {"every": 0},
            "observe": {"progress": False, "tensorboard": False},
            "cluster": {
                "dashboard_port": 0,
                "threads": 1,
                "engines": [{"threads": 1}, {"threads": 1, "min_pass_s": 0.04}],
            },
        }
    )


def run(config: RunConfig, client: Client) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
    with Session(config, client=client) as session:
        assert [values["iteration"] for values in session.iterations()] == [0, 1]
    directory = session.directory
    members = [member for path in sorted((directory / "groups").glob("*.group")) for member in read_group(path)]
    return directory, list(read_events(directory / "events.jsonl").events), {str(m.trajectory_id): m for m in members}


def test_moved_trajectories_take_their_kv_along(slow_model: Path, tmp_path: Path) -> None:
    plain = config_of(slow_model, tmp_path, "plain")
    with local_cluster(plain) as cluster, Client(cluster) as client:
        _, without, expected = run(plain, client)
        directory, log, found = run(config_of(slow_model, tmp_path, "kv", kv_host_gib=0.25), client)
    assert not [event for event in without if event["name"] == "home_changed"]
    moves = [event for event in log if event["name"] == "home_changed"]
    sent = [move for move in moves if move["num_bytes"]]
    assert sent, f"{len(moves)} moves, none with its KV"
    quicker = {event["worker"] for event in log if event.get("reason", "").startswith("move: it is over")}
    assert quicker <= {"rollout-0"}, (
        "none goes to the slow engine for its own pace, only out of a full memory or off a queue"
    )
    assert "rollout-0" in {move["worker"] for move in sent}
    for move in sent:
        assert move["sent"] and move["home"] != move["worker"] and move["took_s"] > 0 and not move["refused"]
        assert 0 < move["num_bytes"] <= move["tokens"] * TOKEN_BYTES
        assert move["num_bytes"] % TOKEN_BYTES == 0
    assert found.keys() == expected.keys()
    for name, member in found.items():
        np.testing.assert_array_equal(member.token_ids, expected[name].token_ids)
    assert replay_run(directory, from_snapshot=False, keys=(), decisions=(), as_json=True)
