"""Libra's metrics on the scheduler's ``/metrics``, and the Grafana board that uses their names."""

import asyncio
import json
import re

import pytest
from tornado.httpclient import AsyncHTTPClient

from libra.observe.endpoints import METRICS, attach_page

EXPOSED = {metric.name + ("_total" if metric.kind == "counter" else ""): metric for metric in METRICS}


@pytest.fixture
def scrape(live_scheduler):
    """Samples of ``/metrics`` of a scheduler with these snapshots: (name, labels) -> value, those of Libra."""
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")

    def read(snapshots):
        async def main():
            async with live_scheduler() as scheduler:
                attach_page(scheduler, lambda: snapshots)
                url = f"http://127.0.0.1:{scheduler.http_server.port}/metrics"
                return (await AsyncHTTPClient().fetch(url)).body.decode()

        families = list(parser.text_string_to_metric_families(asyncio.run(main())))
        assert any(family.name.startswith("dask_scheduler") for family in families)
        samples = [sample for family in families for sample in family.samples if sample.name.startswith("libra_")]
        return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}

    return read


def test_the_scheduler_serves_the_numbers_of_each_run_beside_dasks(make_snapshot, scrape):
    found = scrape([make_snapshot(), make_snapshot(run="other", tokens=7, rewards=[], lag=[])])
    run = ("run", "demo")
    assert found["libra_busy_ratio", (run, ("window", "run"))] == 0.625
    assert found["libra_busy_ratio", (run, ("window", "now"))] == 0.75
    assert found["libra_generated_tokens_total", (run,)] == 4403
    assert found["libra_generated_tokens_total", (("run", "other"),)] == 7
    assert found["libra_quanta_total", (("phase", "TOOL"), run)] == 1203
    assert found["libra_waiting_trajectories", (("level", "1"), ("phase", "ROLLOUT"), run)] == 9
    assert found["libra_failures_total", (("failure", "tool"), run)] == 3
    assert found["libra_served_version", (run, ("worker", "rollout-1"))] == 2
    seconds = found["libra_worker_seconds", (("kind", "engine"), run, ("state", "tail"), ("worker", "rollout-0"))]
    assert seconds == 30
    assert ("libra_reward", (("run", "other"),)) not in found  # none finished: no number
    assert {name for name, _ in found} == set(EXPOSED)


def test_names_are_declared_once_and_the_board_uses_no_others(repository):
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    board = json.loads((repository / "configs" / "grafana_board.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [variable["query"] for variable in board["templating"]["list"]]
    used = {name for expression in expressions for name in re.findall(r"libra_\w+", expression)}
    assert used <= set(EXPOSED)
    assert len(used) >= 10
    for expression in expressions:
        for name, selector in re.findall(r"(libra_\w+)\{([^}]*)\}", expression):
            labels = set(re.findall(r"(\w+)(?:=~|!=|=)", selector))
            assert labels <= {"run", *EXPOSED[name].labels}, expression
    assert all(panel["description"] for panel in board["panels"])
