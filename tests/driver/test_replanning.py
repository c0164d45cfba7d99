"""Accepted plans change roles: what runs is what the scheduler says, each change is compared with what it was to gain."""

from dataclasses import replace

import pytest

from libra.driver.planning import Replanning, RequestedChange, batch_of, change_cost_s, costs_of
from libra.errors import ClusterError
from libra.facts import fields_of
from libra.planner.arrangement_forecast import EndedIteration, RunFacts
from libra.planner.arrangements import REBUCKET, ROLES, SLOTS, Arrangement, Engine, Seat, arranged
from libra.planner.cost import TrajectoryTotals
from libra.planner.replan import ArrangementLoop, Replanner
from libra.planner.step_forecast import StepForecast, Taken
from libra.types import EngineCapacity, StepSeconds

NO_TP = RunFacts(1, 0, 16, 4096, lambda engine, tp: "rollout.engine=vllm", lambda *_: None)


class Scheduler:
    """A scheduler of one hybrid that does what it is asked an iteration later, or undoes it, or refuses."""

    def __init__(self):
        self.row = {
            "worker": "rollout-0", "role": "rollout", "tp": 1, "stage": "resupplied", "generation": 0, "seconds": None,
        }  # fmt: skip
        self.asked = []
        self.limits = []
        self.boundaries = []
        self.told = []
        self.refuses = self.undoes = False

    def tell(self, *facts):
        self.told += [(fact.name, fields_of(fact)) for fact in facts]

    def roles(self):
        return [dict(self.row)]

    def change_roles(self, assignments):
        if self.refuses:
            raise ClusterError("roles: busy")
        self.asked.append(assignments)
        self.row |= {"role": assignments["rollout-0"]["role"], "stage": "draining", "generation": len(self.asked)}
        return len(self.asked)

    def limit_slots(self, slots, reason):
        self.limits.append(slots)

    def set_boundaries(self, tokens, reason):
        self.boundaries.append(tokens)

    def settle(self):
        if self.row["stage"] != "resupplied" and self.undoes:
            self.row["role"] = "rollout" if self.row["role"] == "train" else "train"
        else:
            self.row["seconds"] = 0.25
        self.row["stage"] = "resupplied"


class MadeUp:
    """A run of exact speeds: 100 tokens/s an engine, 1,000 trained tokens/s a replica."""

    def __init__(self, apply=True):
        self.scheduler, self.forecast, self.k = Scheduler(), StepForecast(), 0
        self.told = self.scheduler.told
        loop = ArrangementLoop(NO_TP, Replanner(first_cost_s=0.1, rest_iterations=1))
        self.replanning = Replanning(self.scheduler, loop, apply=apply)

    def seats(self):
        row = self.scheduler.row
        stays = Seat("rollout-1", "node", "transformers", "transformers-tp1-threads1", 1, 8)
        if row["stage"] in ("lost", "failed"):
            return [stays]
        return [Seat("rollout-0", "node", "transformers", "transformers-tp1-threads1", 1, 8, True, row["role"]), stays]

    def iteration(self, generated, trained):
        training = self.scheduler.row["role"] == "train" and self.scheduler.row["stage"] == "resupplied"
        engines = 1 if training else 2
        rollout_s, train_s = generated / engines / 100.0, trained / (1 + training) / 1000.0
        seats = self.seats()
        kind = arranged(seats).engines[0].kind
        taken = Taken(rollout_s, train_s, 0.0, rollout_s + train_s, {kind: generated}, [])
        self.forecast = self.forecast.after(taken, {kind: engines})
        values = {"generated_tokens": generated, "forwarded_tokens": trained, "hybrids": training, "train_s": train_s}
        ended = EndedIteration(self.k, seats, batch_of(values), None, rollout_s + train_s, 50, False)
        self.replanning.after(ended, values, self.forecast)
        self.k += 1

    def fields(self, name):
        return [fields for told, fields in self.told if told == name]


LONG, HEAVY = (3000, 3500), (300, 30000)


def test_workers_go_both_ways_and_each_change_is_compared_with_what_it_was_to_gain():
    run = MadeUp()
    for k in range(40):
        run.iteration(*(HEAVY if 10 <= k < 22 else LONG))
        if run.scheduler.row["stage"] != "resupplied" and k % 2:
            run.scheduler.settle()
    assert [asked["rollout-0"]["role"] for asked in run.scheduler.asked] == ["train", "rollout"]
    there, back = run.fields("plan_realised")
    assert there["predicted_gain_frac"] > 0.2
    assert there["realised_gain_frac"] == pytest.approx(0.45, abs=0.15)  # training is halved, and nearly all there is
    assert back["realised_gain_frac"] > 0.2
    assert there["iteration"] < there["realised_iteration"] < back["iteration"]
    assert there["cost_s"] == back["cost_s"] == 0.25
    accepted = [fields["iteration"] for fields in run.fields("plan_accepted")]
    assert accepted == [there["iteration"], back["iteration"]]
    assert len(run.fields("plan_considered")) > 20  # those that were not accepted too


def test_a_change_that_is_undone_or_refused_is_no_gain_and_is_seen_as_it_is():
    run = MadeUp()
    run.scheduler.undoes = True
    for k in range(12):
        run.iteration(*(HEAVY if k >= 2 else LONG))
        run.scheduler.settle()
    assert len(run.scheduler.asked) >= 1
    assert run.scheduler.row["role"] == "rollout"
    assert not run.fields("plan_realised")
    refused, told = MadeUp(), MadeUp(apply=False)
    refused.scheduler.refuses = True
    for _ in range(12):
        refused.iteration(*HEAVY)
        told.iteration(*HEAVY)
    assert refused.fields("plan_accepted") and told.fields("plan_accepted")
    assert not refused.scheduler.asked and not told.scheduler.asked
    assert {fields["missing"] for fields in refused.fields("plan_blocked")} >= {"roles: busy"}


def test_nothing_is_asked_for_while_a_change_goes_on_and_no_plan_waits_for_a_worker_that_failed():
    run = MadeUp()
    for _ in range(12):
        run.iteration(*HEAVY)
    assert len(run.scheduler.asked) == 1 and not run.fields("plan_realised")  # it does not settle
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


STEPS = StepSeconds(0.02, 0.001, 1e-6, 1e-5, 500, 0.02)


class Two(Scheduler):
    """A scheduler of two hybrids whose changes end at once, with vLLM engines of 2 slots and 384 tokens of KV."""

    def __init__(self):
        super().__init__()
        self.now = {name: {"role": "rollout", "tp": 1} for name in ("rollout-0", "rollout-1")}
        self.fails = False

    def roles(self):
        settled = {"stage": "resupplied", "generation": len(self.asked), "seconds": 0.5}
        return [{"worker": name, **has, **settled} for name, has in self.now.items()]

    def change_roles(self, assignments):
        self.asked.append(assignments)
        if not self.fails:
            self.now |= {name: dict(has) for name, has in assignments.items()}
        return len(self.asked)

    def seats(self):
        joined = self.now["rollout-1"]["role"] == "lent"
        limits = {entry["tp"]: entry["slots"] for named in self.limits for entry in named.values()}
        declared = {1: EngineCapacity(384, 1, 1, 2, 1, STEPS)}
        if joined:
            declared[2] = EngineCapacity(768, 1, 1, 4, 2, replace(STEPS, fixed_s=0.8 * STEPS.fixed_s))
        bonds = {"rollout-0": frozenset({"rollout-1"}), "rollout-1": frozenset({"rollout-0"})}
        return [
            Seat(
                name, "node", "vllm", "vllm-tp1-threads1", 1, 2, True, str(has["role"]),
                bonds[name] if joined else frozenset(), 0, limits, declared,
            )
            for name, has in self.now.items()
        ]  # fmt: skip


class Growing:
    def __init__(self, two, ratio=0.8):
        run = RunFacts(1, 0, 16, 4096, lambda engine, tp: "", lambda *_: (ratio, "a datasheet"))
        self.two, self.forecast, self.k = two, StepForecast(), 0
        self.replanning = Replanning(two, ArrangementLoop(run, Replanner(first_cost_s=1e9)))

    def iteration(self, seats, lengths):
        now = arranged(seats)
        each = {kind: 1000 * count for kind, count in now.by_kind.items()}
        self.forecast = self.forecast.after(Taken(4.0, 1.0, 0.0, 5.0, each, []), now.by_kind)
        values = {"generated_tokens": 2000, "forwarded_tokens": 2000, "train_s": 1.0}
        ended = EndedIteration(self.k, seats, batch_of(values), lengths, 5.0, 20, False)
        self.replanning.after(ended, values, self.forecast)
        self.k += 1


def growing(two, contexts):
    """Fields of the events of a run whose contexts grow so, by name."""
    run = Growing(two)
    for context in contexts:
        run.iteration(two.seats(), TrajectoryTotals.of([context / 2] * 16, [context / 2] * 16))
    return lambda wanted: [fields for name, fields in two.told if name == wanted]


CONTEXTS = [150.0, 175.0, 200.0, 205.0, 205.0, 205.0]


def test_two_engines_become_one_before_memory_runs_out_and_its_slots_are_limited_first():
    two = Two()
    told = growing(two, CONTEXTS)
    assert two.asked == [{"rollout-0": {"role": "rollout", "tp": 2}, "rollout-1": {"role": "lent", "tp": 1}}]
    assert two.limits[0]["rollout-0"]["tp"] == 2 and two.limits[0]["rollout-0"]["slots"] <= 3
    realised = told("plan_realised")[0]
    assert (realised["generation"], realised["cost_s"]) == (1, 0.5)
    considered = told("plan_considered")
    assert "KV memory" in next(fields["reason"] for fields in considered if fields["accepted"])
    assert considered[0]["kv_demand"] > 0
    undone = Two()
    undone.fails = True
    told = growing(undone, CONTEXTS)
    assert len(undone.asked) > 1 and not told("plan_realised")


def test_a_change_costs_what_its_slowest_worker_took_by_what_was_changed():
    changed = enumerate([(4, 1.5), (4, 2.5), (3, 9.0), (0, None)])
    rows = [{"worker": f"rollout-{k}", "generation": g, "seconds": s} for k, (g, s) in changed]
    assert [change_cost_s(rows, generation) for generation in (4, 5, 0)] == [2.5, None, None]
    rows = [{"worker": "a", "generation": 1, "seconds": 2.0}, {"worker": "c", "generation": 2, "seconds": 3.0}]
    before = Arrangement((Engine(("a", "b"), "k", 2, 4, 4), Engine(("c",), "k", 1, 4, 4)), frozenset())
    change = RequestedChange(0, 0.1, before, [], limit_s=0.01)
    alone = {"role": "rollout", "tp": 1}
    change.requested = {1: {"a": alone, "b": alone}, 2: {"c": {"role": "train", "tp": 1}}}
    assert costs_of(change, rows) == [(REBUCKET, 2.0), (ROLES, 3.0), (SLOTS, 0.01)]


def test_boundaries_follow_lengths_by_classes_only():
    two = Two()
    two.now = {"rollout-0": {"role": "rollout", "tp": 2}, "rollout-1": {"role": "lent", "tp": 1}}
    one, both = EngineCapacity(10**6, 1, 1, 2, 1, STEPS), EngineCapacity(2 * 10**6, 1, 1, 4, 2, STEPS)
    third = Seat("rollout-2", "node", "vllm", "vllm-tp1-threads1", 1, 2, declared={1: one})
    run = Growing(two, ratio=1.0)
    for factor in (1.0, 1.1, 1.2, 3.0):
        seats = [replace(seat, declared={1: one, 2: both}, limits={}) for seat in two.seats()] + [third]
        run.iteration(seats, TrajectoryTotals.of([10.0] * 20, [factor * 10.0 * n for n in range(1, 21)]))
    assert [list(tokens) for tokens in two.boundaries] == [["tp1"], ["tp1"]]
    assert two.boundaries[1]["tp1"] > 2 * two.boundaries[0]["tp1"]
