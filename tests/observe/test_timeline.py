"""The data of the page, from events alone."""

import re
from itertools import pairwise

import pytest
from made_events import KEY, capacity, dispatched, ended, parked, published, ranked, started

from libra import facts
from libra.observe.timeline.timeline import BANDS, MAX_SAMPLES, Timeline, band


def facts_of(*given):
    found = Timeline(("train-0",))
    for line in given:
        found.add(line)
    return found


def finished(t_s, iteration, reward=0.5):
    return facts.Line("demo", t_s, facts.IterationFinished(iteration, reward, 1.0))


def waits(t_s, key, level, phase="ROLLOUT"):
    return parked(t_s, key, phase), ranked(t_s, key, level)


def sent(t_s, key):
    return dispatched(t_s, key, "rollout-0")


def test_waiting_trajectories_are_counted_by_level_until_they_are_sent_or_end():
    seen = facts_of(
        started(), *waits(0.1, "a", 41), *waits(0.1, "b", 41), *waits(0.1, "c", 1), *waits(0.1, "d", 0, "TOOL")
    )
    assert seen.snapshot(0.1)["queue"] == {"ROLLOUT": {1: 1, 41: 2}, "TOOL": {0: 1}}
    seen.add(ranked(0.2, "b", -1))
    assert seen.snapshot(0.2)["queue"]["ROLLOUT"] == {-1: 1, 1: 1, 41: 1}
    seen.sample(0.5)
    assert seen.history[-1] == (0.5, 3, 1, 0, 0, 0, 1, 1, 0, 0, 1)
    seen.add(sent(0.6, "a"))
    seen.add(ended(0.7, "b"))
    seen.add(facts.Line("demo", 0.7, facts.PlacementVoid(KEY.format("c"), "ROLLOUT")))
    assert seen.snapshot(0.7)["queue"] == {"ROLLOUT": {}, "TOOL": {0: 1}}
    seen.sample(1.0)
    assert seen.history[-1][:5] == (1.0, 0, 1, 1, 0)
    seen.add(started(0.0))  # another start: nobody has said that anything waits
    assert seen.snapshot(1.0)["queue"] == {"ROLLOUT": {}, "TOOL": {}}


def test_levels_fall_into_bands_in_their_order():
    assert [band(level) for level in (-1, 0, 1, 2, 10, 11, 40, 41, 80)] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len(BANDS) == band(80) + 1


def test_the_history_spans_the_run_evenly_and_is_bounded():
    seen = facts_of(started())
    seen.sample(10_000.0)
    times = [row[0] for row in seen.history]
    assert MAX_SAMPLES / 2 <= len(times) <= MAX_SAMPLES
    (spacing,) = {later - before for before, later in pairwise(times)}
    assert times[0] == 0.0
    assert 10_000.0 - times[-1] < spacing


def test_time_to_go_is_by_the_mean_of_the_last_iterations():
    seen = facts_of(started(iterations=20), facts.Line("demo", 2.0, facts.OpenGate(0, "first")))
    assert seen.left_s(2.0) is None
    seen.add(finished(12.0, 0))
    assert seen.left_s(12.0) == pytest.approx(19 * 10.0)
    for number in range(1, 12):
        seen.add(finished(108.0 + 4.0 * number, number))  # the first took much longer
    assert seen.left_s(152.0) == pytest.approx(8 * 4.0)
    assert seen.left_s(155.0) == pytest.approx(8 * 4.0 - 3.0)
    assert seen.left_s(1000.0) == 0.0
    seen.add(finished(156.0, 19))
    assert seen.left_s(156.0) == 0.0


def test_an_iteration_that_is_done_again_after_a_resume_counts_once():
    seen = facts_of(started(), finished(5.0, 0, 0.25), finished(9.0, 1, 0.5), started(0.0), finished(4.0, 1, 0.75))
    assert seen.snapshot(13.0)["rewards"] == [[0, 0.25], [1, 0.75]]


def test_a_step_is_split_by_what_training_did_between_two_versions():
    before = (published(1.0, 0), *waits(1.0, "a", 1), facts.Line("demo", 1.0, facts.BatchParked(0)), sent(1.5, "a"))
    open_step = facts_of(started(), *before)
    assert open_step.training(3.0) == ""
    open_step.add(ended(4.0, "a"))
    assert open_step.training(4.5) == "grading and committing for 0 s"
    seen = facts_of(
        started(), *before, ended(4.0, "a"),
        facts.Line("demo", 5.0, facts.OpenBatch(0, ((0, 0),), "1 group committed")),
        facts.Line("demo", 8.0, facts.StepFinished(0, 0.1, 2.0)), published(8.5, 1),
    )  # fmt: skip
    ((step, split),) = seen.snapshot(9.0)["steps"]
    assert step == 0
    assert split == pytest.approx({"trajectories": 3.0, "grading": 1.0, "batch": 1.0, "training": 2.0, "moving": 0.5})
    seen.add(started(0.0))
    seen.add(published(20.0, 2))
    assert [step for step, _ in seen.snapshot(30.0)["steps"]] == [0]  # across a restart a step has no time


def test_decisions_are_in_words_the_newest_first_with_gains_and_troubles():
    seen = facts_of(
        started(), facts.Line("demo", 1.0, facts.OpenGate(3, "version 2 >= 3 - eta 1")),
        facts.Line("demo", 2.0, facts.WorkerLost("tcp://h:1")),
        facts.Line("demo", 3.0, facts.PlanRealised(4, 1, 0.25, 0.125, 5, 2.0)), sent(4.0, "x"),
    )  # fmt: skip
    found = seen.snapshot(4.0)["decisions"]
    assert [t_s for t_s, *_ in found] == [4.0, 3.0, 2.0, 1.0]
    assert re.findall(r"[\d.]+", found[1][1]) == ["4", "5", "25.0", "12.5"]
    assert "tcp://h:1" in found[2][1] and found[3][2] == "version 2 >= 3 - eta 1"


def test_slots_and_served_versions_are_those_of_workers_that_are_there():
    seen = facts_of(started(), capacity(1, "rollout-0", 16), capacity(1, "rollout-1", 8), capacity(1, "tool-0", 0, 4))
    for worker in ("rollout-0", "rollout-1"):
        seen.add(facts.Line("demo", 1.5, facts.VersionServed(0, worker, 0.1)))
    assert seen.snapshot(2.0)["slots"] == {"ROLLOUT": {"used": 0, "total": 24}, "TOOL": {"used": 0, "total": 4}}
    seen.add(facts.Line("demo", 3.0, facts.WorkerWithdrawn("rollout-1")))
    assert seen.snapshot(3.0)["slots"]["ROLLOUT"]["total"] == 16
    assert seen.snapshot(3.0)["versions"]["served"] == {"rollout-0": 0}


def test_a_step_is_measured_from_its_gate_to_its_weights_and_only_if_all_of_it_was_seen():
    def steps(*given):
        seen = Timeline(("train-0",))
        seen.steps.train_gpus = 2
        for line in (started(), capacity(0.0, "a", rollout=2), published(1.0, 0), *given):
            seen.add(line)
        return seen

    def at(t_s, fact):
        return facts.Line("demo", t_s, fact)

    gate = at(2.0, facts.OpenGate(0, ""))
    rest = (
        parked(2.0, 0), dispatched(2.0, 0, "a"), at(6.0, facts.QuantumFinished(KEY.format(0), "ROLLOUT", 9, "", "", 4.0)),
        ended(6.0, 0), at(7.0, facts.GroupCommitted("train", 0, 0, 0, 0.5, {})), at(7.0, facts.OpenWave(0, 0, ((0, 0),), "")),
        at(10.0, facts.WaveTrained(0, 0, 1, 0, 3.0, 1)), at(11.0, facts.StepFinished(0, 0.1, 3.0)),
    )  # fmt: skip
    step = steps(gate, *rest).measured(1, 12.0)
    assert (step.step, step.complete_s, step.waves, step.update_s) == (0, (5.0,), ((1, 4.5),), 2.0)
    assert (step.rollout_gpus, step.rollout_gpu_s) == (1.0, 4.0)
    assert steps(*rest).measured(1, 12.0) is None
