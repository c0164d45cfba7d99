"""Engines of several kinds: what a worker says of its engine, and a run on two vLLM engines of different degrees."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from live_runs import address_of, events_of, named

from libra import keys
from libra.cluster.local import engine_resources, thread_bindings, worker_resources
from libra.config import RunConfig, config_from_dict
from libra.driver.session import Session
from libra.errors import ConfigError, EngineError
from libra.rollout.vllm_settings import is_installed
from libra.worker import engine_factory
from libra.worker.engine_factory import EngineKind, check_engine, make_engine


def test_a_worker_says_what_its_engine_is_like_and_the_configuration_says_the_rest() -> None:
    config = config_from_dict({"rollout": {"engine": "vllm", "tp": 2, "slots": 9}, "cluster": {"threads": 4}})
    plain = EngineKind.of(config, {keys.ROLLOUT: 9})
    assert (plain.slots, plain.tp, plain.threads, plain.bucket) == (9, 2, 4, "vllm-tp2-threads4")
    own = EngineKind.of(config, {keys.ROLLOUT: 5, keys.TP: 1, keys.THREADS: 1})
    assert (own.slots, own.tp, own.threads, own.bucket) == (5, 1, 1, "vllm-tp1-threads1")
    assert EngineKind.of(config_from_dict({}), {keys.ROLLOUT: 1}).bucket == "transformers-tp1"
    with pytest.raises(EngineError, match="TP=2"):
        EngineKind.of(config_from_dict({}), {keys.ROLLOUT: 1, keys.TP: 2})


def test_groups_of_engines_become_workers_with_annotations_and_cores_of_their_own() -> None:
    groups = [{"tp": 2, "threads": 1, "count": 2}, {"slots": 7}]
    config = config_from_dict({"rollout": {"engine": "vllm", "slots": 4}, "cluster": {"engines": groups}})
    alike = {keys.ROLLOUT: 4, keys.TP: 2, keys.THREADS: 1}
    assert engine_resources(config) == [alike, alike, {keys.ROLLOUT: 7, keys.TP: 1}]
    assert [n for n in worker_resources(config) if n.startswith("rollout")] == [f"rollout-{i}" for i in range(3)]
    assert engine_resources(config_from_dict({"cluster": {"rollout_workers": 2}})) == [{keys.ROLLOUT: 64}] * 2
    groups = [{"tp": 2, "threads": 1}, {"tp": 1, "threads": 2}]
    config = config_from_dict({"rollout": {"engine": "vllm"}, "cluster": {"engines": groups}})
    assert thread_bindings(config, [0, 2, 4, 6]) == {"rollout-0": "0|2", "rollout-1": "4,6"}
    assert thread_bindings(config, [0, 2, 4]) == {}
    assert thread_bindings(config_from_dict({"rollout": {"engine": "vllm"}}), [0, 1]) == {}


def test_an_engine_that_cannot_be_started_is_refused_before_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch, random_model: Path
) -> None:
    for name in ("kv_cache_gib", "kv_host_gib"):
        with pytest.raises(ConfigError, match=f"rollout.{name}"):  # it holds no context
            check_engine(config_from_dict({"rollout": {name: 1e-4}}))
        check_engine(config_from_dict({"rollout": {name: 0.01}}))
    monkeypatch.setattr(engine_factory, "memory_bytes", lambda: 3 * 2**30)
    with pytest.raises(ConfigError, match=r"rollout\.kv_host_gib=0\.75"):
        check_engine(config_from_dict({"rollout": {"kv_host_gib": 2.0}, "cluster": {"rollout_workers": 2}}))
    check_engine(config_from_dict({"rollout": {"kv_host_gib": 2.0}}))
    elsewhere = {"rollout": {"kv_host_gib": 4.0}, "cluster": {"scheduler": "tls://10.0.0.1:8786"}}
    check_engine(config_from_dict(elsewhere))  # the workers' machines are not known here
    with pytest.raises(ConfigError, match=r"rollout\.kv_host_gib"):
        make_engine(config_from_dict(elsewhere), EngineKind("transformers", 2), random_model)
    monkeypatch.setattr("libra.rollout.vllm_settings.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="make setup-vllm"):
        check_engine(config_from_dict({"rollout": {"engine": "vllm"}}))


def kill_engine_once(run: str, dask_worker: Any) -> None:
    """Kill the engine's process under the first generation that comes while others run."""
    engine = dask_worker.plugins[f"libra-{run}"].engine.serving.engine
    generate, killed = engine.generate, []

    async def killing(request: Any) -> Any:
        if engine.stats().running and not killed:
            killed.append(engine.process_ids[0])
            os.kill(engine.process_ids[0], signal.SIGKILL)
        return await generate(request)

    engine.generate = killing


@pytest.mark.vllm
@pytest.mark.skipif(not is_installed(), reason="vllm is not installed here: make setup-vllm")
@pytest.mark.timeout(900)
def test_a_run_goes_through_engines_of_two_buckets_and_outlives_the_death_of_one(
    make_config: Callable[..., RunConfig],
) -> None:
    two = [{"tp": 1, "threads": 1, "slots": 3}, {"tp": 2, "threads": 1, "slots": 3}]
    config = make_config(
        run={"iterations": 2, "eta": 1},
        model={"path": "libra/tiny-arithmetic"},
        rollout={"engine": "vllm", "max_new_tokens": 16},
        trainer={"prompts": 2, "group_size": 6, "lr": 1e-3},
        cluster={"engines": two},
    )
    with Session(config) as session:  # engines of vLLM are bound to cores, which the shared clusters' are not
        session.client.run(kill_engine_once, "demo", workers=[address_of(session.client, "rollout-0")])
        numbers = list(session.iterations())
        model_dir = session.spec.model_dir
    assert sum(each["resampled/engine"] for each in numbers) > 0  # classified, and tried again
    assert all(each["failures/engine"] == each["failures/worker"] == 0 for each in numbers)

    events = events_of(session.directory)
    served = {(e["worker"], e["version"]): (e["tp"], e["bucket"]) for e in named(events, "version_served")}
    assert served["rollout-0", 0] == (1, "vllm-tp1-threads1") and served["rollout-1", 0] == (2, "vllm-tp2-threads1")
    assert {worker for worker, version in served if version > 0} == {"rollout-0", "rollout-1"}
    given = Counter(e["worker"] for e in named(events, "quantum_dispatched") if e["phase"] == "ROLLOUT")
    assert set(given) == {"rollout-0", "rollout-1"}
    store = zarr.open_group(session.directory / "trajectories.zarr", mode="r")
    columns = ("token_ids", "is_action", "behaviour_logprob", "weight_version", "kv_version")
    tokens = {name: store[name][:] for name in columns}
    assert_logprobs_are_those_of_transformers(Path(model_dir), tokens, store["trajectory/offset"][:])


def assert_logprobs_are_those_of_transformers(
    model_dir: Path, tokens: dict[str, np.ndarray], offsets: np.ndarray
) -> None:
    """Every token that version 0 generated has the log-probability that plain transformers gives it."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    checked = 0
    for begin, end in zip(offsets, [*offsets[1:], len(tokens["token_ids"])], strict=True):
        ids = torch.from_numpy(tokens["token_ids"][begin:end].astype(np.int64))[None]
        with torch.no_grad():
            table = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
        expected = np.concatenate([[0.0], table.gather(1, ids[0, 1:, None])[:, 0].numpy()])
        mine = tokens["is_action"][begin:end] & (tokens["weight_version"][begin:end] == 0)
        mine &= tokens["kv_version"][begin:end] == 0
        checked += int(mine.sum())
        np.testing.assert_allclose(tokens["behaviour_logprob"][begin:end][mine], expected[mine], atol=1e-3)
    assert checked > 0
