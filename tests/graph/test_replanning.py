"""Accepted plans change roles: what runs is what the scheduler says, each change is compared with what it was to gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from libra.config import RunConfig
from libra.errors import ClusterError
from libra.events import EVENTS
from libra.graph.driver import Session
from libra.graph.replanning import Replanning, change_cost_s
from libra.planner.measured import StepForecast, Taken
from libra.planner.replan import Rules
from libra.planner.splits import Fleet, SplitLoop, Weighed
from libra.store.event_log import read_events

KINDS = {"rollout-0": "e", "rollout-1": "e"}
RULES = Rules(first_cost_s=0.1, rest_iterations=1)


class Scheduler:
    """A scheduler of one hybrid that does what it is asked an iteration later, or undoes it, or refuses."""

    def __init__(self) -> None:
        self.row = {"worker": "rollout-0", "role": "rollout", "tp": 1, "stage": "resupplied", "generation": 0}
        self.row["seconds"] = None
        self.asked: list[Mapping[str, str]] = []
        self.refuses = self.undoes = False

    def rows(self) -> Sequence[Mapping[str, Any]]:
        return [dict(self.row)]

    def change(self, assignments: Mapping[str, str]) -> int:
        if self.refuses:
            raise ClusterError("roles: busy")
        self.asked.append(assignments)
        self.row |= {"role": assignments["rollout-0"], "stage": "draining", "generation": len(self.asked)}
        return len(self.asked)

    def settle(self) -> None:
        if self.row["stage"] != "resupplied" and self.undoes:
            self.row["role"] = "rollout" if self.row["role"] == "train" else "train"
        else:
            self.row["seconds"] = 0.25
        self.row["stage"] = "resupplied"


class Run:
    """A run of exact speeds: 100 tokens/s an engine, 1,000 trained tokens/s a replica."""

    def __init__(self) -> None:
        self.scheduler, self.told, self.forecast, self.k = (
            Scheduler(),
            list[tuple[str, dict[str, Any]]](),
            StepForecast(),
            0,
        )
        self.replanning = Replanning(self.scheduler, 1, lambda name, f: self.told.append((name, dict(f))), RULES)

    def iteration(self, generated: int, trained: int) -> None:
        training = self.scheduler.row["role"] == "train" and self.scheduler.row["stage"] == "resupplied"
        engines = 1 if training else 2
        rollout_s, train_s = generated / engines / 100.0, trained / (1 + training) / 1000.0
        self.forecast = self.forecast.after(
            Taken(rollout_s, train_s, 0.0, rollout_s + train_s, {"e": generated}, []), {"e": engines}
        )
        workers = ["rollout-1"] if training else list(KINDS)
        values = {
            "generated_tokens": generated,
            "forwarded_tokens": trained, "hybrids": int(training), "train_s": train_s,
        }  # fmt: skip
        self.replanning.after(self.k, values, rollout_s + train_s, KINDS, workers, self.forecast, 50, overlap=False)
        self.k += 1

    def names(self) -> list[str]:
        return [name for name, _ in self.told]

    def fields(self, name: str) -> list[dict[str, Any]]:
        return [fields for told, fields in self.told if told == name]


LONG, HEAVY = (3000, 3500), (300, 30000)


def test_workers_go_both_ways_and_each_change_is_compared_with_what_it_was_to_gain() -> None:
    run = Run()
    for k in range(40):
        run.iteration(*(HEAVY if 10 <= k < 22 else LONG))
        if run.scheduler.row["stage"] != "resupplied" and k % 2:
            run.scheduler.settle()
    assert [asked["rollout-0"] for asked in run.scheduler.asked] == ["train", "rollout"]
    there, back = run.fields("plan_realised")
    assert there["predicted_gain_frac"] > 0.2
    assert there["realised_gain_frac"] == pytest.approx(0.45, abs=0.15)  # training is halved, and nearly all there is
    assert back["realised_gain_frac"] > 0.2
    assert there["iteration"] < there["realised_iteration"] < back["iteration"]
    assert there["cost_s"] == back["cost_s"] == 0.25
    accepted = [fields["iteration"] for fields in run.fields("plan_accepted")]
    assert accepted == [there["iteration"], back["iteration"]]
    assert len(run.fields("plan_considered")) > 20  # those that were not accepted too
    for name, fields in run.told:
        EVENTS[name](run="demo", t_s=0.0, **fields)


def test_nothing_is_asked_for_while_a_change_goes_on() -> None:
    run = Run()
    for k in range(30):
        run.iteration(*(HEAVY if k >= 4 else LONG))
    assert len(run.scheduler.asked) == 1  # it never settles
    assert not run.fields("plan_realised")


def test_a_change_that_is_undone_or_refused_is_no_gain_and_is_seen_as_it_is() -> None:
    run = Run()
    run.scheduler.undoes = True
    for k in range(12):
        run.iteration(*(HEAVY if k >= 2 else LONG))
        run.scheduler.settle()
    assert len(run.scheduler.asked) >= 1
    assert run.scheduler.row["role"] == "rollout"
    assert not run.fields("plan_realised")
    refused = Run()
    refused.scheduler.refuses = True
    for _ in range(12):
        refused.iteration(*HEAVY)
    assert refused.fields("plan_accepted")
    assert not refused.scheduler.asked


def test_the_cost_of_a_change_is_that_of_its_slowest_worker() -> None:
    rows = [
        {"worker": f"rollout-{k}", "generation": g, "seconds": s}
        for k, (g, s) in enumerate([(4, 1.5), (4, 2.5), (3, 9.0)])
    ]
    assert change_cost_s(rows, 4) == 2.5
    assert change_cost_s(rows, 5) is None
    assert change_cost_s([{"worker": "rollout-0", "generation": 0, "seconds": None}], 0) is None


@pytest.mark.timeout(300)
def test_a_run_carries_out_what_its_planner_accepts(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes; what is accepted is set here, since what is quick depends on who else uses the machine."""
    weigh, accepted_at = SplitLoop.weigh, {1: 1, 4: 0}

    def decided(self: SplitLoop, iteration: int, forecast: Any, fleet: Fleet, *rest: Any) -> Weighed | None:
        weighed = weigh(self, iteration, forecast, fleet, *rest)
        assert weighed is not None
        training = accepted_at.get(iteration, fleet.training)
        considered = replace(weighed.considered, accepted=training != fleet.training, commands=())
        return replace(weighed, considered=considered, training=training, roles=fleet.roles(training))

    monkeypatch.setattr(SplitLoop, "weigh", decided)
    config = make_config(
        run={"iterations": 8},
        cluster={"rollout_workers": 2, "hybrid_workers": 1},
        planner={"replan": True, "apply": True},
    )
    with Session(config) as session:
        rows = []
        for values in session.iterations():
            rows.append(values)
            for generation in {row["generation"] for row in session.roles.rows()} - {0}:
                session.roles.wait(generation)  # so that the next iteration is wholly in the new roles
    events = [*read_events(session.directory / "events.jsonl").events]
    changed = [event for event in events if event["name"] == "role_changed"]
    assert [(event["worker"], event["to_role"]) for event in changed] == [
        ("rollout-0", "train"),
        ("rollout-0", "rollout"),
    ]
    assert max(row["hybrids"] for row in rows[2:5]) == 1
    realised = [event for event in events if event["name"] == "plan_realised"]
    assert [(event["iteration"], event["generation"]) for event in realised] == [
        (1, changed[0]["generation"]),
        (4, changed[1]["generation"]),
    ]
    assert [event["cost_s"] for event in realised] == [event["seconds"] for event in changed]
    assert all(event["realised_iteration"] > event["iteration"] for event in realised)
    considered = [event for event in events if event["name"] == "plan_considered"]
    assert {event["iteration"]: event["accepted"] for event in considered if event["accepted"]} == {1: True, 4: True}
    assert len(considered) > 2  # those that were not accepted too


def test_a_worker_that_failed_is_no_part_of_the_fleet_and_no_plan_waits_for_it() -> None:
    run = Run()
    while not run.scheduler.asked:
        run.iteration(*HEAVY)
    run.iteration(*HEAVY)
    considered = len(run.fields("plan_considered"))
    run.scheduler.row["stage"] = "failed"
    for _ in range(4):
        run.iteration(*HEAVY)
    assert len(run.fields("plan_considered")) > considered  # the change is over, and the others are planned for
    assert len(run.scheduler.asked) == 1  # of it nothing is asked
    run.scheduler.row |= {"role": "rollout", "stage": "resupplied"}  # it was started anew
    for _ in range(4):
        run.iteration(*HEAVY)
    assert len(run.scheduler.asked) == 2
