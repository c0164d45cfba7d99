"""What the nodes of a batch do with the configured algorithm: rewards of groups, and who takes part in the step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from libra.config import config_from_dict
from libra.config.algorithms import ALGORITHMS
from libra.graph.member_rows import group_rewards
from libra.train import TrainSettings, batch_advantages
from libra.types import EndReason, FailureClass
from libra.worker import batch_rows


def member(reward: float, tokens: int = 3, failure=FailureClass.NONE, end=EndReason.ANSWERED):
    return SimpleNamespace(
        trajectory_id=SimpleNamespace(sample=1),
        reward=reward,
        num_action_tokens=tokens,
        failure=failure,
        end_reason=end,
        advantage=None,
    )


@pytest.fixture
def groups():
    return [
        [member(0.0, 2), member(1.0, 5, end=EndReason.LENGTH)],
        [member(1.0), member(1.0)],
        [member(float("nan"), 0, FailureClass.ENGINE), member(2.0)],
    ]


def rows_of(groups, **filters):
    advantages, trains = batch_advantages([group_rewards(group) for group in groups], "grpo", **filters)
    return [
        {"path": str(index), "advantages": a.tolist(), "trains": t.tolist()}
        for index, (a, t) in enumerate(zip(advantages, trains, strict=True))
    ]


def test_filters_leave_members_out_of_the_step_and_nowhere_else(groups, monkeypatch):
    monkeypatch.setattr(batch_rows, "read_group", lambda path: groups[int(path.name)])
    batch = {"members": rows_of(groups, drop_uniform_groups=True, drop_truncated=True)}
    assert len(batch_rows.members_of(batch, Path("groups"))) == 6
    kept = batch_rows.members_of(batch, Path("groups"), of_the_step=True)
    assert kept == [groups[0][0], groups[2][0]]  # a failure is still there: the replica counts it as excluded
    assert all(np.isfinite(one.advantage) for one in batch_rows.members_of(batch, Path("groups")))
    batch = {"members": rows_of(groups)}
    assert len(batch_rows.members_of(batch, Path("groups"), of_the_step=True)) == 6


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_of_the_configuration_makes_settings_of_a_replica(name):
    teacher = ["distil.teacher=t"] if name == "opd" else []
    config = config_from_dict({}, [f"trainer.algorithm={name}", *teacher])
    settings = TrainSettings.of_run(config)
    assert settings.loss == ALGORITHMS[name].preset.loss
    assert settings.clip_high == ALGORITHMS[name].preset.clip_high
