"""Which questions come again is told to the scheduler before an iteration begins; an environment's fault there stops nothing."""

from __future__ import annotations

from typing import Any

from distributed import Client
from live_runs import events_of, named

from libra.driver.session import Session
from libra.driver.upcoming_prompts import UpcomingPrompts
from libra.envs import FunctionEnvironment
from libra.sim.from_run import workload_of_run


class Elsewhere:
    """An environment whose questions are only where its workers are."""

    asked = 0

    def prompt(self, split: str, index: int) -> Any:
        self.asked += 1
        raise OSError("no such file")

    prompt_id = prompt


def test_a_run_names_the_prompts_of_each_iteration_before_it_begins(make_config: Any, client: Client) -> None:
    environment = FunctionEnvironment(prompts=["a", "b", "c"], eval_prompts=["d"], reward=lambda completion: 1.0)
    with Session(make_config(run={"iterations": 3}), environment=environment, client=client) as session:
        assert all("forecast_weight_history" in row for row in session.iterations())
    events = events_of(session.directory)
    asked = [environment.prompt("train", index).prompt_id for index in range(6)]
    assert {e["iteration"]: e["prompts"] for e in named(events, "prompts_named")} == {
        k: asked[2 * k : 2 * k + 2] for k in range(3)
    }
    assert set(asked[:3]) == set(asked[3:])
    work = workload_of_run(session.directory)
    assert [plan.prompt for plan in work.trajectories] == [name for name in asked for _ in range(2)]
    for k in range(3):
        order = [event["name"] for event in events if event.get("iteration") == k]
        assert order.index("prompts_named") < order.index("gate_parked")


def test_an_environment_that_fails_here_is_asked_once_and_done_without() -> None:
    environment = Elsewhere()
    prompts = UpcomingPrompts(environment, 2)  # type: ignore[arg-type]
    assert prompts.lengths(0) is None and prompts.lengths(1) is None and environment.asked == 1
    environment = Elsewhere()
    prompts = UpcomingPrompts(environment, 2)  # type: ignore[arg-type]
    assert prompts.names(0) is None and prompts.names(1) is None and environment.asked == 1
