"""Runs with a KL penalty in the reward and with discounted returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from distributed import Client

from libra.config import RunConfig
from libra.driver.session import run

KL = {"kl_coef": 0.1, "kl_in_reward": True, "kl_target": 1e-9, "kl_horizon": 10.0, "lr": 1e-3}


@pytest.mark.parametrize(
    "trainer",
    [
        {"algorithm": "rloo", **KL, "streaming": "on"},
        {"algorithm": "reinforce_pp", **KL, "gamma": 0.9, "dispatch": "peer"},
        {"algorithm": "reinforce_pp", "gamma": 0.9, "minibatches": 2, "m2po_threshold": 1e-9},
    ],
)
def test_a_run_learns_from_rewards_per_token(
    make_config: Callable[..., RunConfig], client: Client, trainer: dict[str, Any]
) -> None:
    summary = run(make_config(run={"iterations": 3}, trainer=trainer), client=client)
    rows = summary.iterations
    assert [row["optimizer_steps"] for row in rows] == [trainer.get("minibatches", 1)] * 3
    if "kl_coef" in trainer:  # the engine has the reference's weights at first, and then others
        assert rows[0]["kl_reference"] < 1e-6 < rows[2]["kl_reference"]
        assert rows[1]["kl_coef"] != rows[2]["kl_coef"] > 0
    else:
        assert {row["kl_coef"] for row in rows} == {0.0}
        assert rows[0]["rejected_frac"] > 0
