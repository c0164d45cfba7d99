"""A run of two engines of which one goes wrong, version by version: the alarm, and what `libra diagnose` says of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from distributed import Client
from failing_layer import LAYER, disturb_layer

from libra.cli.main import cli
from libra.cluster.local import local_cluster
from libra.cluster.present_workers import present_workers
from libra.config import load_config
from libra.driver.session import run
from libra.observe.mismatch_diagnosis import diagnose
from libra.untrusted import shown_line

FIRST, ALARM = 2, 1e-5


@pytest.fixture(scope="module")
def ramped(repository: Path, tmp_path_factory: pytest.TempPathFactory):
    """The quick start with two engines; from version 2 on a layer of rollout-1 is disturbed after its check."""
    config = load_config(
        str(repository / "configs" / "quickstart.yaml"),
        [
            f"run.dir={tmp_path_factory.mktemp('ramp')}", "run.name=ramp", "run.iterations=12", "trainer.prompts=8",
            "trainer.lr=1e-4", f"trainer.mismatch_k3_alarm={ALARM}", "evaluation.prompts=0", "cluster.rollout_workers=2",
            "cluster.dashboard_port=0", "observe.progress=false", "observe.tensorboard=false",
        ],
    )  # fmt: skip
    with local_cluster(config) as cluster, Client(cluster) as client:
        workers = present_workers(client)
        (address,) = (address for address, facts in workers.items() if facts["name"] == "rollout-1")
        client.run(disturb_layer, FIRST, 0.08, 1.6, workers=[address])
        return run(config, client=client)


def fall(rewards: np.ndarray) -> int:
    """The first step from which the mean reward of three is below three quarters of the mean before (the first step left out)."""
    steps = range(3, len(rewards) - 2)
    return next(step for step in steps if rewards[step : step + 3].mean() < 0.75 * rewards[1:step].mean())


def test_the_alarm_comes_at_least_five_steps_before_the_reward_falls(ramped) -> None:
    rows = ramped.iterations
    engines = {name: np.array([row[f"mismatch_k3/{name}"] for row in rows]) for name in ("rollout-0", "rollout-1")}
    assert engines["rollout-0"].max() < 1e-9
    assert engines["rollout-1"][:FIRST].max() < 1e-9
    found = diagnose(ramped.directory)
    assert found.first is not None and found.threshold == ALARM
    assert FIRST <= found.first <= fall(np.array([row["reward"] for row in rows])) - 5


def test_the_diagnosis_names_step_version_engine_tokens_and_layer(ramped) -> None:
    done = CliRunner().invoke(cli, ["diagnose", str(ramped.directory)])
    assert done.exit_code == 1, done.output
    found = diagnose(ramped.directory)
    assert f"step {found.first}: k3 is above" in done.output and f"version {found.first}:" in done.output
    assert [part.name for part in found.parts if part.name.startswith("engine")] == ["engine rollout-1"]
    assert any(part.name.startswith("length class") for part in found.parts)
    assert found.tokens and {token.engine for token in found.tokens} == {"rollout-1"}
    assert all(token.text is not None for token in found.tokens)
    assert all(repr(shown_line(token.text)) in done.output for token in found.tokens)
    (layer,) = found.layers
    assert (layer.worker, layer.layer, layer.version, layer.loading) == ("rollout-1", LAYER, found.first, False)
    assert f"layer {LAYER}: rollout-1 disagrees with version {found.first} when it left the version" in done.output
