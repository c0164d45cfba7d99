"""Engines of several kinds: what a worker says of its engine, and what cannot be started."""

import pytest

from libra import keys
from libra.cluster.local import engine_resources, thread_bindings, worker_resources
from libra.config import config_from_dict
from libra.errors import ConfigError, EngineError
from libra.worker.engine import engine_factory
from libra.worker.engine.engine_factory import EngineKind, check_engine, make_engine


def test_a_worker_says_what_its_engine_is_like_and_the_configuration_says_the_rest():
    config = config_from_dict({"rollout": {"engine": "vllm", "tp": 2, "slots": 9}, "cluster": {"threads": 4}})
    plain = EngineKind.of(config, {keys.ROLLOUT: 9})
    assert (plain.slots, plain.tp, plain.threads, plain.bucket) == (9, 2, 4, "vllm-tp2-threads4")
    own = EngineKind.of(config, {keys.ROLLOUT: 5, keys.TP: 1, keys.THREADS: 1})
    assert (own.slots, own.tp, own.threads, own.bucket) == (5, 1, 1, "vllm-tp1-threads1")
    assert EngineKind.of(config_from_dict({}), {keys.ROLLOUT: 1}).bucket == "transformers-tp1"
    with pytest.raises(EngineError, match="TP=2"):
        EngineKind.of(config_from_dict({}), {keys.ROLLOUT: 1, keys.TP: 2})


def test_groups_of_engines_become_workers_with_annotations_and_cores_of_their_own():
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


def test_an_engine_that_cannot_be_started_is_refused_before_a_worker_starts(monkeypatch, random_model):
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
    monkeypatch.setattr("libra.config.sections.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="make setup-vllm"):
        check_engine(config_from_dict({"rollout": {"engine": "vllm"}}))
