"""Whole runs in which an engine goes wrong, weights come from another worker, or the mismatch alarm goes off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from distributed import Client

from libra.cluster.present_workers import present_workers
from libra.config import RunConfig
from libra.driver.session import Session, run
from libra.errors import MismatchAlarm
from libra.observe.metrics import read_metrics
from libra.observe.mismatch_diagnosis import diagnose
from libra.store.event_log import read_events
from libra.weights import WeightStore

Config = Callable[..., RunConfig]


def rollout_address(client: Client) -> str:
    """Address of the worker with the engine."""
    workers = present_workers(client)
    return next(address for address, facts in workers.items() if "ROLLOUT" in facts["resources"])


def break_next_load(version: int) -> None:
    """On a worker: the next engine that loads ``version`` keeps a stale head; engines after it are whole."""
    from libra.rollout import TransformersEngine

    whole = TransformersEngine._load

    def load(engine, number, directory):
        old = engine._batch.model.lm_head.weight.clone()
        whole(engine, number, directory)
        if number == version:
            TransformersEngine._load = whole
            head = type(engine._batch.forward.head)(*reversed(old.shape), bias=False)
            head.weight.data = old
            engine._batch.forward.head = head.requires_grad_(False)

    TransformersEngine._load = load


break_next_load.__module__ = "__main__"  # sent to the worker by value, which cannot import this file


def test_a_run_goes_on_past_a_stale_head(make_config: Config, client: Client) -> None:
    client.run(break_next_load, 2, workers=[rollout_address(client)])
    summary = run(make_config(run={"iterations": 4}, trainer={"lr": 1e-2}), client=client)
    assert [values["iteration"] for values in summary.iterations] == [0, 1, 2, 3]
    assert all(values["mismatch_max_abs"] < 1e-3 and values["left_out"] == 0 for values in summary.iterations)
    events = list(read_events(summary.directory / "events.jsonl").events)
    (told,) = [event for event in events if event["name"] == "engine_quarantined"]
    assert (told["version"], told["layer"], told["worker"], told["out"]) == (2, "lm_head.weight", told["worker"], False)
    checked = [event for event in events if event["name"] == "version_checked"]
    assert [event["version"] for event in checked] == [0, 1, 2, 3, 4][: len(checked)] and len(checked) >= 4
    assert all(event["measured"] and event["smallest_change"] == 0 for event in checked[1:])
    assert events.index(told) < events.index(next(event for event in checked if event["version"] == 2))


def test_exact_logprobs_leave_no_gap_in_fifty_steps(make_config: Config, client: Client) -> None:
    config = make_config(run={"iterations": 50}, rollout={"exact_logprobs": True}, trainer={"lr": 1e-2})
    summary = run(config, client=client)
    assert len(summary.iterations) == 50 and all(values["mismatch_tokens"] > 0 for values in summary.iterations)
    for name in ("mismatch_max_abs", "mismatch_k3", "mismatch_k3/rollout-0", "mismatch_mean_abs/rollout-0"):
        assert {values[name] for values in summary.iterations} == {0.0}, name
    metrics = [row for row in read_metrics(summary.directory) if "mismatch_k3" in row]
    assert [row["mismatch_effective_frac"] for row in metrics] == [1.0] * 50
    found = diagnose(summary.directory)
    assert (found.first, found.steps, found.threshold) == (None, 50, 0.0)


def test_pause_takes_the_step_and_no_further_one_until_the_run_is_resumed(make_config: Config, client: Client) -> None:
    alarm = {"mismatch_alarm": 1e-12, "mismatch_action": "pause"}
    config = make_config(run={"iterations": 3, "eta": 1}, trainer=alarm)
    with pytest.raises(MismatchAlarm, match=r"paused after step 0 .*libra resume"):
        run(config, client=client)
    weights = WeightStore(config.run.dir / "demo" / "weights")
    assert weights.numbers()[-1] == 1
    summary = run(make_config(run={"iterations": 3, "eta": 1}), client=client, resume=True)
    assert summary.iterations[-1]["iteration"] == 2
    assert weights.numbers()[-1] == 3


def test_stop_refuses_the_very_step(make_config: Config, client: Client) -> None:
    config = make_config(trainer={"mismatch_alarm": 1e-12, "mismatch_action": "stop"})
    with pytest.raises(MismatchAlarm, match=r"step 0.*was not taken"):
        run(config, client=client)
    assert WeightStore(config.run.dir / "demo" / "weights").numbers() == [0]


def test_weights_come_from_another_worker_where_the_registry_is_not_shared(make_config: Config, client: Client) -> None:
    config = make_config(run={"iterations": 3}, weights={"transfer": "peer"}, store={"keep_versions": 2})
    address = rollout_address(client)
    with Session(config, client=client) as session:
        numbers = list(session.iterations())
        held = client.run(fetched_versions, session.spec.run, workers=[address])[address]
    assert [values["iteration"] for values in numbers] == [0, 1, 2]
    assert all(values["mismatch_max_abs"] < 1e-3 for values in numbers)
    root, versions = held
    assert (not root.startswith(str(session.directory)) and versions == [1, 2]) or versions == [2, 3]
    events = list(read_events(session.directory / "events.jsonl").events)
    assert [event["version"] for event in events if event["name"] == "version_checked"][:3] == [0, 1, 2]


def fetched_versions(run: str, dask_worker) -> tuple[str, list[int]]:
    """On a worker: where its versions lie, and which there are."""
    host = dask_worker.plugins[f"libra-{run}"]
    return str(host.context.weights.store.root), host.context.weights.store.numbers()


fetched_versions.__module__ = "__main__"
