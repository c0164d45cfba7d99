"""Whole runs whose weights come from another worker, or whose mismatch alarm goes off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import whole_run
from distributed import Client

from libra.cluster.present_workers import present_workers
from libra.config import RunConfig
from libra.driver.session import Session, run
from libra.errors import MismatchAlarm
from libra.observe.metrics import read_metrics
from libra.observe.mismatch_diagnosis import diagnose
from libra.weights import WeightStore

pytestmark = pytest.mark.live

Config = Callable[..., RunConfig]


def test_exact_logprobs_leave_no_gap(make_config: Config, client: Client) -> None:
    config = make_config(run={"iterations": 12}, rollout={"exact_logprobs": True}, trainer={"lr": 1e-2})
    summary = run(config, client=client)
    assert len(summary.iterations) == 12 and all(values["mismatch_tokens"] > 0 for values in summary.iterations)
    for name in ("mismatch_max_abs", "mismatch_k3", "mismatch_k3/rollout-0", "mismatch_mean_abs/rollout-0"):
        assert {values[name] for values in summary.iterations} == {0.0}, name
    rows = [row for row in read_metrics(summary.directory) if "mismatch_k3" in row]
    assert [row["mismatch_effective_frac"] for row in rows] == [1.0] * 12
    found = diagnose(summary.directory)
    assert (found.first, found.steps, found.threshold) == (None, 12, 0.0)


@pytest.mark.parametrize(("action", "published"), [("pause", 1), ("stop", 0)])
def test_an_alarm_takes_no_further_step_until_the_run_is_resumed(
    action: str, published: int, make_config: Config, client: Client
) -> None:
    alarm = {"mismatch_alarm": 1e-12, "mismatch_action": action}
    with pytest.raises(MismatchAlarm):
        run(make_config(run={"iterations": 3, "eta": 1}, trainer=alarm), client=client)
    again = make_config(run={"iterations": 3, "eta": 1})
    weights = WeightStore(again.run.dir / "demo" / "weights")
    assert weights.numbers()[-1] == published
    if action == "pause":
        assert run(again, client=client, resume=True).iterations[-1]["iteration"] == 2
        assert weights.numbers()[-1] == 3


def test_weights_come_from_another_worker_where_the_registry_is_not_shared(make_config: Config, client: Client) -> None:
    config = make_config(run={"iterations": 3}, weights={"transfer": "peer"}, store={"keep_versions": 2})
    (address,) = (a for a, facts in present_workers(client).items() if "ROLLOUT" in facts["resources"])
    with Session(config, client=client) as session:
        numbers = list(session.iterations())
        root, versions = client.run(fetched_versions, session.spec.run, workers=[address])[address]
    assert [values["iteration"] for values in numbers] == [0, 1, 2]
    assert all(values["mismatch_max_abs"] < 1e-3 for values in numbers)
    assert not root.startswith(str(session.directory)) and versions in ([1, 2], [2, 3])
    checked = whole_run.events_of(session.directory, "version_checked")
    assert [event["version"] for event in checked][:3] == [0, 1, 2]


def fetched_versions(run: str, dask_worker: Any) -> tuple[str, list[int]]:
    """On a worker: where its versions lie, and which there are."""
    weights = dask_worker.plugins[f"libra-{run}"].context.weights
    return str(weights.store.root), weights.store.numbers()


fetched_versions.__module__ = "__main__"
