"""What settings of the trainer do in a live run: old policies, routes, baselines, rewards per token."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from whole_run import address_of

from libra.driver.run_session import Session, run
from libra.store.run_records import read_batch_facts
from libra.store.trajectory_store import TrajectoryStore
from libra.weights import WeightStore


def dies_after_the_old_policies(run, dask_worker):
    """From now on the trainer is killed in a step whose tokens have been scored under their versions."""
    gradient = dask_worker.plugins[f"libra-{run}"].trainer.replica.gradient
    gradient.accumulate = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)


def test_old_policies_are_exact_for_every_token_and_a_killed_trainer_takes_the_same_steps_again(make_config, client):
    from libra.worker.training.checkpoint_writer import CheckpointWriter
    from libra.worker.training.worker_trainer import make_replica, recover

    config = make_config(
        run={"iterations": 6, "eta": 3}, trainer={"old_logp": "version", "correction": "truncate", "lr": 1e-3},
        checkpoint={"every": 4}, store={"keep_versions": 1},
    )  # fmt: skip
    with Session(config, client=client) as session:
        iterations = session.iterations()
        rows = [next(iterations) for _ in range(5)]
        session.client.run(dies_after_the_old_policies, run="demo", workers=[address_of(client, "train-0")])
        rows += iterations
    assert [row["iteration"] for row in rows] == list(range(6)) and max(row["lag_max"] for row in rows) > 0
    scored = [row for row in rows if row["forwarded_tokens"]]
    assert scored and all(row["exact_old_frac"] == 1.0 for row in scored)
    spec, store = session.spec, WeightStore(session.spec.weights_dir)
    assert store.numbers()[-6:] == list(range(1, 7))  # eta versions before the checkpoint of 4 steps, and all since
    shutil.rmtree(spec.checkpoints_dir / "step-000006")
    replica = make_replica(spec, spec.model_dir, None)
    replica.published = store.read
    again = recover(CheckpointWriter(replica, spec.checkpoints_dir, config), spec, store, 6)
    assert [(step["step"], step["digest"]) for step in again] == [(n - 1, store.get(n).digest) for n in (5, 6)]


def test_routes_of_experts_go_from_engine_to_trainer(make_config, random_moe, client):
    trainer = {"routes": "replay", "dispatch": "peer", "lr": 1e-2}
    config = make_config(run={"iterations": 3, "eta": 1}, model={"path": str(random_moe)}, trainer=trainer)
    rows = [row for row in run(config, client=client).iterations if row["forwarded_tokens"]]
    assert rows and all(row["routes_replayed_frac"] == 1.0 for row in rows)
    assert rows[0]["routes_equal_frac"] == 1.0 and all(row["expert_load_ratio"] >= 1 for row in rows)
    assert all(row.get("mismatch_max_abs", 0.0) < 1e-3 for row in rows)


def test_of_remax_the_first_sample_is_greedy_and_the_baseline_of_the_others(make_config, client, random_model):
    import torch
    from transformers import AutoModelForCausalLM

    trainer = {"algorithm": "remax", "group_size": 3, "lr": 1e-3}
    config = make_config(run={"iterations": 1}, rollout={"chunk_tokens": 2}, trainer=trainer)
    with Session(config, client=client) as session:
        (values,) = session.iterations()
    facts = read_batch_facts(session.spec.batches_dir, 0)["groups"]
    with TrajectoryStore.open(session.directory / "trajectories.zarr") as store:
        stored = [store.trajectory(index) for index in range(store.num_trajectories)]
    model = AutoModelForCausalLM.from_pretrained(random_model)
    assert len(facts) == 2
    for row in facts:
        group = int(Path(row["path"]).stem.split("-")[2])
        members = [m for m in stored if m.trajectory_id.split == "train" and m.trajectory_id.group == group]
        likeliest = []
        for member in members:
            with torch.no_grad():
                best = model(input_ids=torch.as_tensor(member.token_ids.astype(np.int64))[None]).logits[0].argmax(-1)
            where = np.flatnonzero(member.is_action)
            likeliest.append(bool((best.numpy()[where - 1] == member.token_ids[where]).all()))
        assert likeliest == [member.trajectory_id.sample == 0 for member in members] and len(members) == 3
        baseline = next(member.reward for member in members if member.trajectory_id.sample == 0)
        assert row["trains"] == [member.trajectory_id.sample != 0 for member in members]
        expected = [member.reward - baseline if member.trajectory_id.sample else 0.0 for member in members]
        assert row["advantages"] == pytest.approx(expected)
    assert values["sequences"] == 4  # the greedy ones have no part in the step


def test_a_run_learns_from_rewards_per_token(make_config, client):
    kl = {"kl_coef": 0.1, "kl_args": {"in_reward": True, "target": 1e-9}, "lr": 1e-3}
    trainer = {"algorithm": "reinforce_pp", **kl, "gamma": 0.9, "dispatch": "peer"}
    rows = run(make_config(run={"iterations": 3}, trainer=trainer), client=client).iterations
    assert [row["optimizer_steps"] for row in rows] == [1] * 3
    # The engine has the reference's weights at first, and then others.
    assert rows[0]["kl_reference"] < 1e-6 < rows[2]["kl_reference"]
    assert rows[1]["kl_coef"] != rows[2]["kl_coef"] > 0
