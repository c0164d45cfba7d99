"""What a live run measured of itself is what is simulated of it."""

from __future__ import annotations

from collections.abc import Callable

from distributed import Client

from libra.config import RunConfig
from libra.driver.session import Session
from libra.sim.from_run import run_setting


def test_a_simulation_has_the_trajectories_order_and_seconds_of_a_run(
    make_config: Callable[..., RunConfig], client: Client
) -> None:
    config = make_config(
        run={"iterations": 3}, rollout={"max_new_tokens": 8, "max_turns": 4}, trainer={"prompts": 4, "group_size": 4}
    )
    with Session(config, client=client) as session:
        list(session.iterations())
    setting = run_setting(session.directory)
    simulator = setting.simulator()
    outcome, realised = simulator.run(), setting.realised
    assert realised is not None and outcome.moves == realised.moves == 0  # there is one engine
    assert (outcome.trajectories, outcome.turns) == (3 * 16, 3 * 16 * 4)
    assert [spec.name for spec in setting.engines] == ["rollout-0"] and len(setting.options.steps_s) == 3

    (engine,), calibration = setting.calibration.engines, setting.calibration
    assert (engine.engine, engine.tp, engine.slots) == ("transformers", 1, 8)
    assert min(map(max, (engine.transport_s, engine.worker_s, calibration.tool_transport_s))) > 0.0
    assert min(calibration.gate_s, calibration.commit_s, calibration.update_s) > 0.0 and calibration.digest

    plans = {plan[:3]: plan for plan in setting.workload.trajectories}
    begun: dict[tuple[int, ...], None] = {}
    for parked in setting.record.named("trajectory_parked"):
        place = tuple(int(part) for part in parked["key"].split("-")[2:5])
        begun[place] = None
        if parked["quanta"]:  # what the policy was told of its context
            plan, (turns, half) = plans[place], divmod(parked["quanta"], 2)
            tokens = plan.prompt_tokens + sum(t.new_tokens + t.payload_tokens for t in plan.turns[:turns])
            assert parked["context_tokens"] == tokens + (plan.turns[turns].new_tokens if half else 0)
    assert [plan[:3] for plan in setting.workload.trajectories] == list(begun)
    first = dict.fromkeys(dispatched.key for dispatched in simulator.record.dispatched)
    assert [tuple(int(part) for part in key.split("-")[2:5]) for key in first] == list(begun)
