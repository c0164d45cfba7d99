"""A run with vLLM engines that speculate: its trajectories are those of a run that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

from libra.cluster.local import local_cluster
from libra.config import RunConfig
from libra.driver.session import Session
from libra.rollout.vllm_settings import is_installed
from libra.store.event_log import read_events

SLOTS = 6


@pytest.mark.skipif(not is_installed(), reason="vllm is not installed here: make setup-vllm")
@pytest.mark.timeout(900)
def test_trajectories_of_a_run_are_the_same_with_and_without_drafts(make_config: Callable[..., RunConfig]) -> None:
    def config(name: str, **rollout: Any) -> RunConfig:
        return make_config(
            run={"name": name, "iterations": 2},
            model={"path": "libra/tiny-arithmetic"},
            rollout={"engine": "vllm", "max_new_tokens": 24, "slots": SLOTS} | rollout,
            trainer={"prompts": 3, "group_size": 4, "lr": 0.0},
            evaluation={"prompts": 0},
        )

    def run(config: RunConfig, client: Client) -> tuple[dict[tuple[int, ...], dict[str, Any]], list[dict[str, Any]]]:
        with Session(config, client=client) as session:
            assert [values["iteration"] for values in session.iterations()] == [0, 1]
        store = zarr.open_group(session.directory / "trajectories.zarr", mode="r")
        columns = {name: store[name][:] for name in ("token_ids", "behaviour_logprob")}
        rows = (store[f"trajectory/{name}"][:] for name in ("iteration", "group", "sample", "offset", "length"))
        members = {
            tuple(map(int, name)): {key: column[begin : begin + length] for key, column in columns.items()}
            for *name, begin, length in zip(*rows, strict=True)
        }
        log = read_events(session.directory / "events.jsonl").events
        return members, [event for event in log if event["name"] == "version_served"]

    with local_cluster(config("plain")) as cluster, Client(cluster) as client:
        plain, without = run(config("plain"), client)
        drafting, served = run(config("drafting", speculate=True, chunk_tokens=7), client)
    assert plain.keys() == drafting.keys() and len(plain) == 2 * 3 * 4
    for name, member in plain.items():
        assert member["token_ids"].tolist() == drafting[name]["token_ids"].tolist()
        np.testing.assert_allclose(member["behaviour_logprob"], drafting[name]["behaviour_logprob"], atol=1e-5)
    assert all(event["stats"]["drafted_tokens"] == 0 for event in without)
    stats = served[-1]["stats"]  # of the engine's work before it served the last version
    assert 0 < stats["accepted_tokens"] <= stats["drafted_tokens"]
    by_rows = [stats.get(f"drafted_tokens_batch{rows}", 0) for rows in (1, 2, 4, 8)]
    assert sum(by_rows) == stats["drafted_tokens"] and "drafted_tokens_batch16" not in stats
