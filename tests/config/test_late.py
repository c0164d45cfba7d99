"""Settings of late rewards: what contradicts them, and where they have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from libra.config import config_from_dict
from libra.config.effect_conditions import Situation
from libra.config.effects import ignored_settings
from libra.config.streaming import most_waves
from libra.errors import ConfigError

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "whole batch": (
        {"algorithm": "reinforce_pp"},
        "advantage=reinforce_pp may look at other groups.*type trainer.advantage=grpo",
    ),
    "minibatches": ({"minibatches": 2}, "type trainer.minibatches=1"),
    "KL in the reward": (
        {"algorithm": "rloo", "kl_in_reward": True, "kl_coef": 0.1},
        "type trainer.kl_in_reward=false",
    ),
    "no ratio": ({"loss": "reinforce"}, "trainer.loss=reinforce has no ratio; type trainer.loss=ppo"),
    "own loss": ({"loss": "package.module:loss"}, "may have a term without the advantage"),
    "another ratio": ({"old_logp": "proximal"}, "type trainer.correction=truncate, or trainer.old_logp=behaviour"),
    "streamed": ({"streaming": "on"}, "trainer.late=correct looks for rewards when a batch is complete"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_correction_cannot_do_is_refused_with_what_to_type(case: str) -> None:
    trainer, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        config_from_dict({"trainer": {"late": "correct", **trainer}})


@pytest.mark.parametrize("late", ["wait", "drop"])
def test_the_other_settings_refuse_streaming_alone(late: str) -> None:
    for case, (trainer, _) in REFUSED.items():
        if case not in ("streamed", "own loss"):
            config_from_dict({"trainer": {"late": late, **trainer}})
    with pytest.raises(ConfigError, match=r"type trainer\.late=off"):
        config_from_dict({"trainer": {"late": late, "streaming": "on"}})
    assert most_waves(config_from_dict({"trainer": {"late": late, "streaming": "auto"}})) == 0


@pytest.mark.parametrize(
    ("trainer", "ignored"),
    [
        ({"late_tau": 5.0}, ["trainer.late_tau"]),
        ({"late": "wait", "late_versions": 3}, ["trainer.late_versions"]),
        ({"late": "correct", "late_wait_s": 3.0}, ["trainer.late_wait_s"]),
        ({"late": "correct", "late_tau": 5.0, "late_versions": 3}, []),
        ({"late": "wait", "late_wait_s": 3.0}, []),
    ],
)
def test_a_setting_without_effect_is_said(trainer: dict[str, Any], ignored: list[str]) -> None:
    found = ignored_settings(config_from_dict({"trainer": trainer}), Situation("run"))
    assert [each.field for each in found] == ignored
