"""Engines of two speeds: the policy goes by what they declare, and trajectories that change engines take their KV along."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

import factories
from libra.cluster.local import local_cluster
from libra.config import config_from_dict
from libra.driver.session import Session
from libra.events import Event, from_dict
from libra.policy.log_replay import replay
from libra.policy.move_review import moves
from libra.scheduler.worker_registry import UPDATE_FRAC
from libra.store.event_log import EventReader
from libra.store.group_records import read_group
from libra.types import EngineCapacity

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

TRACES = Path(__file__).parents[2] / "benchmarks" / "data" / "agent_turns" / "tau_airline_gpt4o.csv"
SLOW_S = 0.04
SLOTS, LAYERS = 2, 6
TOKEN_BYTES = 2 * LAYERS * 1 * 16 * 4
"""Keys and values: layers, KV heads, head size, float32."""
Log = list[tuple[int, Event]]


@pytest.fixture(scope="module")
def slow_model(random_model, tmp_path_factory):
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


def config_of(model, directory, name, **rollout):
    args = {
        "path": str(TRACES), "groups": 3, "group_size": 4, "tokens_frac": 0.05, "payload_frac": 0.3, "tool_frac": 0.0,
    }  # fmt: skip
    engines = [{"threads": 1}, {"threads": 1, "min_pass_s": SLOW_S}]
    settings = factories.run_settings(
        directory, model, run={"name": name}, environment={"name": "libra.testing:TraceTurns", "args": args},
        rollout={"slots": SLOTS, "max_context_tokens": 1024, "max_turns": 64, "max_new_tokens": 64} | rollout,
        trainer={"prompts": 3, "group_size": 4, "lr": 0.0, "micro_batch_tokens": 4096, "max_row_tokens": 1024},
        checkpoint={"every": 0}, cluster={"engines": engines},
    )  # fmt: skip
    return config_from_dict(settings)


@pytest.fixture(scope="module")
def runs(slow_model, tmp_path_factory):
    """Log and trajectories of a run whose KV stays, and of one whose KV moves; one of the engines has a speed of its own."""
    directory, found = tmp_path_factory.mktemp("runs"), {}
    plain = config_of(slow_model, directory, "plain")
    with local_cluster(plain) as cluster, Client(cluster) as client:
        for config in (plain, config_of(slow_model, directory, "kv", kv_host_gib=0.25)):
            with Session(config, client=client) as session:
                assert [values["iteration"] for values in session.iterations()] == [0, 1]
            records = sorted(session.spec.groups_dir.glob("*.group"))
            members = {str(member.trajectory_id): member for path in records for member in read_group(path)}
            log = [(n, from_dict(event)) for n, event in EventReader(session.directory / "events.jsonl")]
            found[config.run.name] = log, members
    return found


def test_engines_declare_their_budget_and_seconds_and_the_policy_is_told_both(runs):
    log, _ = runs["plain"]
    for worker in ("rollout-0", "rollout-1"):
        mine = [event for _, event in log if getattr(event, "worker", None) == worker]
        first, *_, last = (
            EngineCapacity.from_declaration({name: getattr(e, name) for name in e.__struct_fields__})
            for e in mine
            if e.name == "engine_declared"
        )
        assert first.steps is None, "at its start it has measured nothing"
        assert (last.slots, last.tp, last.max_context_tokens, last.kv_token_bytes) == (SLOTS, 1, 1024, TOKEN_BYTES)
        told = [event for event in mine if event.name == "worker_capacity"][-1]
        assert last.steps is not None and (told.kv_tokens, told.rollout_slots) == (last.kv_tokens, SLOTS)
        assert told.alone_s_per_token == pytest.approx(last.steps.step_s(1, 0), rel=2 * UPDATE_FRAC)
    assert last.steps.step_s(SLOTS, SLOTS * 100) >= 0.7 * SLOW_S, "no pass takes less, and the fit has an error"


def test_moved_trajectories_take_their_kv_along_and_generate_the_same_tokens(runs):
    (without, expected), (log, found) = runs["plain"], runs["kv"]
    assert not [event for _, event in without if event.name == "home_changed"]
    changed = [event for _, event in log if event.name == "home_changed"]
    sent = [move for move in changed if move.num_bytes]
    assert sent, f"{len(changed)} moves, none with its KV"
    for move in sent:
        assert move.sent and move.home != move.worker and not move.refused
        assert 0 < move.num_bytes <= move.tokens * TOKEN_BYTES and move.num_bytes % TOKEN_BYTES == 0
    assert found.keys() == expected.keys()
    for name, member in found.items():
        np.testing.assert_array_equal(member.token_ids, expected[name].token_ids)
    assert [told.difference for lines in (without, log) for told in replay(lines) if told.difference] == []
    explained, dispatched = moves(without)
    assert dispatched == sum(e.name == "quantum_dispatched" and e.phase == "ROLLOUT" for _, e in without)
    assert all(move.reason.startswith("move: ") for move in explained)
