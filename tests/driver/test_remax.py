"""A run whose first sample of each group is the greedy answer, and the baseline of the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed import Client
from transformers import AutoModelForCausalLM

from libra.config import RunConfig
from libra.driver.session import Session
from libra.store.batch_membership import read_batch_facts
from libra.store.trajectories import TrajectoryStore


@pytest.mark.parametrize("chunk_tokens", [None, 2])
def test_the_first_sample_is_greedy_and_the_baseline_of_the_others(
    make_config: Callable[..., RunConfig], client: Client, random_model: Path, chunk_tokens: int | None
) -> None:
    config = make_config(
        run={"iterations": 1},
        rollout={"chunk_tokens": chunk_tokens},
        trainer={"algorithm": "remax", "group_size": 3, "lr": 1e-3},
    )
    with Session(config, client=client) as session:
        (values,) = session.iterations()
    facts = read_batch_facts(session.spec.batches_dir, 0)["groups"]
    with TrajectoryStore.open(session.directory / "trajectories.zarr") as store:
        stored = [store.trajectory(index) for index in range(store.num_trajectories)]
    model = AutoModelForCausalLM.from_pretrained(random_model)
    assert len(facts) == 2
    for row in facts:
        split, iteration, group = Path(row["path"]).stem.split("-")
        place = split, int(iteration), int(group)
        members = [
            m for m in stored if (m.trajectory_id.split, m.trajectory_id.iteration, m.trajectory_id.group) == place
        ]
        assert len(members) == 3
        likeliest = []
        for member in members:
            with torch.no_grad():
                best = model(input_ids=torch.as_tensor(member.token_ids.astype(np.int64))[None]).logits[0].argmax(-1)
            where = np.flatnonzero(member.is_action)
            likeliest.append(bool((best.numpy()[where - 1] == member.token_ids[where]).all()))
        assert likeliest == [member.trajectory_id.sample == 0 for member in members]
        baseline = next(member.reward for member in members if member.trajectory_id.sample == 0)
        assert row["trains"] == [member.trajectory_id.sample != 0 for member in members]
        expected = [member.reward - baseline if member.trajectory_id.sample else 0.0 for member in members]
        assert row["advantages"] == pytest.approx(expected)
    assert values["sequences"] == 4  # the greedy ones have no part in the step
