"""Outcomes of decisions, from hand-made logs: seconds per token before and after, and nothing
where nothing is comparable."""

import pytest
from made_events import CONSIDERED, RUN, at

from libra import facts
from libra.observe.timeline.decision_outcomes import DecisionOutcomes
from libra.types import Phase


class Log:
    """A log that grows: iterations of given seconds and tokens, and what is decided between them."""

    def __init__(self):
        self.t_s, self.iteration, self.told = 0.0, 0, DecisionOutcomes()
        self.start()

    def start(self):
        self.t_s = 0.0
        self.told.add(at(0.0, facts.RunStarted(0, 0, 2, 1, "fifo", "")))

    def iterations(self, *seconds, tokens=100, split="train"):
        for each in seconds:
            self.t_s += each
            key = f"trajectory-{split}-{self.iteration}-0-0-e0-{RUN}"
            self.told.add(at(self.t_s, facts.QuantumFinished(key, Phase.ROLLOUT, tokens, "", "", 0.1)))
            self.told.add(at(self.t_s, facts.IterationFinished(self.iteration, 0.5, 0.0)))
            self.iteration += 1

    def plan(self, *, accepted=True):
        self.told.add(at(self.t_s, facts.PlanConsidered(self.iteration, accepted=accepted, **CONSIDERED)))

    def change(self, generation, worker="hybrid-0"):
        role = {worker: {"role": "rollout", "tp": 1}}
        self.told.add(at(self.t_s, facts.RoleChangeStarted(generation, role, "a plan", None)))

    def changed(self, generation, worker="hybrid-0"):
        self.told.add(at(self.t_s, facts.RoleChanged(worker, generation, "train", "rollout", 1, 1, {}, 2.0)))

    def outcomes(self, kind=facts.PlanConsidered):
        return [each for each in self.told.outcomes() if isinstance(each.event, kind)]


def test_a_plan_that_was_carried_out_is_compared_by_seconds_per_token():
    log = Log()
    log.iterations(50.0, 10.0, 10.0, 10.0, 10.0)  # the first has the start in it
    log.plan()
    log.change(1)
    log.iterations(99.0, 99.0)  # of neither arrangement
    log.changed(1)
    log.iterations(99.0)  # the change ended in it
    log.iterations(14.0, 14.0, tokens=200)  # longer, of twice as many tokens
    (plan,) = log.outcomes()
    assert plan.predicted_frac == pytest.approx(0.2)
    assert plan.realised_frac == pytest.approx(0.3)
    assert (plan.before, plan.after, plan.realised_words) == (3, 2, "30.0 % (3 iterations against 2)")
    (change,) = log.outcomes(facts.RoleChangeStarted)
    assert change.realised_frac == plan.realised_frac and change.predicted_words == ""


def test_only_iterations_between_this_change_and_the_next_count():
    log = Log()
    log.iterations(50.0, 10.0)
    log.told.add(at(log.t_s, facts.SlotsSet("rollout-0", 1, 8, 16, "asked for")))
    log.iterations(99.0, 5.0)
    log.told.add(at(log.t_s, facts.SlotsSet("rollout-0", 1, 4, 16, "asked for")))
    log.iterations(99.0, 20.0, 20.0)
    first, second = log.outcomes(facts.SlotsSet)
    assert (first.realised_frac, first.before, first.after) == (pytest.approx(0.5), 1, 1)
    assert (second.realised_frac, second.before, second.after) == (pytest.approx(-3.0), 1, 2)


def test_evaluations_lost_workers_and_other_starts_are_not_compared():
    log = Log()
    log.iterations(50.0, 10.0)
    log.iterations(70.0, split="eval")
    log.plan()
    log.change(1)
    log.changed(1)
    log.iterations(99.0)
    log.told.add(at(log.t_s, facts.WorkerLost("tcp://gone")))
    log.iterations(5.0)
    log.start()
    log.iterations(5.0, 5.0)
    (plan,) = log.outcomes()
    assert plan.realised_frac is None and plan.why == "not known: no comparable iteration after it"
    assert plan.before == 1, "the evaluation is left out, and what was before it is not"


def test_what_was_not_carried_out_has_no_gain():
    log = Log()
    log.iterations(50.0, 10.0)
    log.plan(accepted=False)
    log.iterations(10.0)
    log.plan()  # planner.apply=false
    log.iterations(10.0)
    log.plan()
    log.change(1)
    log.told.add(at(log.t_s, facts.RoleChangeFailed(1, "its engine did not start")))
    log.iterations(10.0, 10.0)
    log.told.add(at(log.t_s, facts.PlanBlocked(5, "a third worker", 0.4, 0.0, 1, ((1, 2),), ())))
    log.iterations(10.0)
    *plans, blocked = log.outcomes((facts.PlanConsidered, facts.PlanBlocked))
    whys = [each.why for each in plans]
    assert whys == ["not carried out"] * 2 + ["not carried out: its role switch failed or was cancelled"]
    assert (blocked.predicted_words, blocked.realised_words) == ("40.0 %", "not carried out")


def test_a_layout_that_the_run_began_with_has_predicted_and_real_seconds():
    log = Log()
    log.told.add(at(0.0, facts.LayoutPlanned("m", "cpu", 2, 1, ((1, 1, 8),), (), 512, 8.0, "tables", "fastest", ())))
    assert log.outcomes(facts.LayoutPlanned)[0].realised_words == "not known: no iteration with it alone"
    log.iterations(50.0, 9.0, 11.0)
    (layout,) = log.outcomes(facts.LayoutPlanned)
    assert (layout.predicted_words, layout.realised_words) == ("8.0 s", "10.0 s (2 iterations)")


def test_no_change_before_a_comparison_is_not_known():
    log = Log()
    log.told.add(at(0.0, facts.BoundariesSet(((1, 100.0),), "policy.boundaries_tokens")))
    log.iterations(50.0, 10.0)
    assert [each.why for each in log.outcomes(facts.BoundariesSet)] == ["not known: no comparable iteration before it"]
