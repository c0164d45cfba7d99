"""A run of real processes, and its simulation: what it measured of itself is what is simulated."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import Client

from libra.cli.main import main
from libra.driver.session import Session
from libra.sim.from_run import RunSetting, run_setting

NOISY = 0.5
"""How far off a whole run of a few seconds may be predicted on a machine that does other things too. Whoever leaves out what is
between engines, or takes a datasheet's seconds, is off by factors."""


@pytest.fixture(name="setting", scope="module")
def _setting(random_model: object, client: Client, tmp_path_factory: pytest.TempPathFactory) -> RunSetting:
    from libra.config import config_from_dict

    config = config_from_dict(
        {
            "run": {"name": "simulated", "dir": str(tmp_path_factory.mktemp("runs")), "iterations": 3},
            "model": {"path": str(random_model)},
            "environment": {"name": "libra.testing:FixedTurns"},
            "rollout": {"max_new_tokens": 8, "max_turns": 4, "ignore_eos": True, "slots": 8},
            "trainer": {"prompts": 4, "group_size": 4, "lr": 1e-3},
            "cluster": {"threads": 1, "dashboard_port": 0},
            "observe": {"progress": False, "tensorboard": False},
        }
    )
    with Session(config, client=client) as session:
        list(session.iterations())
    return run_setting(session.directory)


def test_a_run_is_predicted_on_its_own_engines(setting: RunSetting) -> None:
    outcome, realised = setting.simulator().run(), setting.realised
    assert realised is not None
    assert (outcome.trajectories, outcome.turns) == (3 * 16, 3 * 16 * 4)
    assert [spec.name for spec in setting.engines] == ["rollout-0"]
    assert outcome.makespan_s == pytest.approx(realised.makespan_s, rel=NOISY)
    assert sum(outcome.rollout_s) == pytest.approx(sum(realised.rollout_s), rel=NOISY)
    assert outcome.moves == realised.moves == 0  # there is one engine


def test_systems_are_compared_on_the_trajectories_of_a_run(
    setting: RunSetting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, run_dir = tmp_path / "systems.html", str(setting.record.directory)
    given = ["simulate", "libra/quickstart", "--from-run", run_dir, "--against", "all", "--gpus", "4", "--seeds", "1"]
    with pytest.raises(SystemExit) as stopped:
        main([*given, "--plot", str(picture)])
    out = capsys.readouterr().out
    assert not stopped.value.code
    systems = {line.split()[0] for line in out.splitlines() if line.startswith("  ")}
    assert {"colocated", "split", "streaming", "turning", "turning_oracle", "rollpacker"} <= systems
    assert "4 GPUs, eta 0, 4 groups of 4" in out and f"trajectories of {run_dir}" in out
    assert "takes are the assumed seconds of updates" in out and "simulation.model=Qwen3-8B" in out  # a tiny model
    assert "turning_kv_cmlfq" in picture.read_text()
    with pytest.raises(SystemExit):
        main([*given[:6], "--seeds", "1"])
    assert "the run has 2 GPUs; type 3 or more" in capsys.readouterr().err


def test_what_is_between_engines_is_measured(setting: RunSetting) -> None:
    (engine,), calibration = setting.calibration.engines, setting.calibration
    assert (engine.engine, engine.tp, engine.slots) == ("transformers", 1, 8)
    assert min(map(max, (engine.transport_s, engine.worker_s, calibration.tool_transport_s))) > 0.0
    assert min(calibration.gate_s, calibration.commit_s) > 0.0
    assert calibration.digest and calibration.update_s > 0.0
    assert len(setting.options.steps_s) == 3


def test_the_policy_is_told_the_tokens_of_contexts(setting: RunSetting) -> None:
    plans = {plan[:3]: plan for plan in setting.workload.trajectories}
    told = [
        (quantum["key"], quantum["quanta"], quantum["context_tokens"])
        for quantum in setting.record.named("trajectory_parked")
        if quantum["quanta"]
    ]
    assert told
    for key, quanta, context_tokens in told:
        plan = plans[tuple(int(part) for part in key.split("-")[2:5])]
        turns, half = divmod(quanta, 2)
        expected = plan.prompt_tokens + sum(t.new_tokens + t.payload_tokens for t in plan.turns[:turns])
        assert context_tokens == expected + (plan.turns[turns].new_tokens if half else 0)


def test_trajectories_begin_in_the_order_of_the_run(setting: RunSetting) -> None:
    """All of an iteration arrive in one instant; who is first decides where long ones go."""
    begun: list[tuple[int, ...]] = []
    for event in setting.record.named("trajectory_parked"):
        place = tuple(int(part) for part in event["key"].split("-")[2:5])
        if place not in begun:
            begun.append(place)
    assert [plan[:3] for plan in setting.workload.trajectories] == begun
    assert begun != sorted(begun), "Dask parks in an order of its own; else this test shows nothing"
    simulator = setting.simulator()
    simulator.run()
    first: dict[str, None] = dict.fromkeys(dispatched.key for dispatched in simulator.record.dispatched)
    assert [tuple(int(part) for part in key.split("-")[2:5]) for key in first] == begun
