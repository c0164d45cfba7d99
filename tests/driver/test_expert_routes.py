"""Runs of a mixture of experts whose trainer replays the engine's routes, over storage and over the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client

from libra.config import RunConfig, config_from_dict
from libra.driver.session import run
from libra.errors import ConfigError


@pytest.mark.parametrize("dispatch", ["storage", "peer"])
def test_routes_go_from_engine_to_trainer(
    make_config: Callable[..., RunConfig], random_moe: Path, client: Client, dispatch: str
) -> None:
    config = make_config(
        run={"iterations": 3, "eta": 1},
        model={"path": str(random_moe)},
        trainer={"routes": "replay", "balance_experts": True, "dispatch": dispatch, "lr": 1e-2},
    )
    summary = run(config, client=client)
    rows = [row for row in summary.iterations if row["forwarded_tokens"]]
    assert rows and all(row["routes_replayed_frac"] == 1.0 for row in rows)
    assert rows[0]["routes_equal_frac"] == 1.0 and all(row["expert_load_ratio"] >= 1 for row in rows)
    assert all(row["mismatch_max_abs"] < 1e-3 for row in rows)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rollout": {"engine": "vllm"}}, "rollout.engine=vllm does not"),
        ({"rollout": {"kv_host_gib": 0.1}}, "rollout.kv_host_gib=null"),
        ({"rollout": {"exact_logprobs": True}}, "rollout.exact_logprobs=false"),
    ],
)
def test_what_records_no_routes_is_refused_with_what_to_type(changes: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_from_dict({"trainer": {"routes": "replay"}, **changes})
