"""What bounds a step and how to take it: closed forms, the choice between them, and what the user is told."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.facts import OpenBatch, OpenWave, StepMeasured, TakeSteps
from libra.policy import Admission, CommittedGroup, Waves, WayChoice, WaySettings
from libra.policy.step_ways import (
    SPLIT,
    STAYS_FRAC,
    STREAMING,
    TURNING,
    WORTH_FRAC,
    StepParts,
    chosen,
    forms,
    regime,
    streamed_end_s,
    wave_price,
)

ROLLOUT_S, TRAIN_S, UPDATE_S = 300.0, 160.0, 10.0
MADE = StepParts(16, 8, 0, ROLLOUT_S, TRAIN_S, UPDATE_S, throughput_s=280.0, longest_s=100.0)
WORK_S = (280.0 * 8 + TRAIN_S * 8) / 16
WAYS = ("split", "streaming", "turning")
LATE, ALIKE = (1.0, 1.0, 1.0, 9.0), (9.0, 9.0, 9.0, 9.0)


def test_the_forms_of_a_synchronous_step():
    found = forms(MADE, 18.8)
    assert found == pytest.approx({
        SPLIT: 470.0, STREAMING: ROLLOUT_S + TRAIN_S / 2 + UPDATE_S, TURNING: ROLLOUT_S + TRAIN_S / 4 + UPDATE_S + 18.8,
    })  # fmt: skip
    assert MADE.path_over_work == pytest.approx((100.0 + UPDATE_S) / WORK_S)
    measured = forms(replace(MADE, left_s=10.0), 18.8)
    assert measured[STREAMING] == pytest.approx(ROLLOUT_S + 10.0 + UPDATE_S) and measured[SPLIT] == found[SPLIT]


def test_the_forms_of_steps_that_overlap():
    later = forms(replace(MADE, eta=1, throughput_s=100.0), 18.8)
    assert later == pytest.approx({
        SPLIT: (ROLLOUT_S + TRAIN_S + UPDATE_S) / 2, STREAMING: (ROLLOUT_S + TRAIN_S / 2 + UPDATE_S) / 2,
        TURNING: (ROLLOUT_S + TRAIN_S / 4 + UPDATE_S) / 2 + 18.8,
    })  # fmt: skip
    bound = forms(replace(MADE, eta=4), 18.8)  # engines are the limit, whatever the trainers do
    assert bound[SPLIT] == bound[STREAMING] == 280.0 and bound[TURNING] > 280.0


def test_a_publication_beside_the_next_step_counts_only_where_it_is_longer():
    busy = replace(MADE, eta=3, throughput_s=50.0, rollout_s=100.0)
    assert forms(busy, 60.0)[SPLIT] == TRAIN_S + UPDATE_S
    assert forms(replace(busy, beside_s=UPDATE_S), 60.0)[SPLIT] == TRAIN_S
    assert forms(replace(busy, beside_s=UPDATE_S - 4.0), 60.0)[STREAMING] == TRAIN_S + 4.0
    assert forms(replace(busy, update_s=200.0, beside_s=200.0), 60.0)[SPLIT] == 200.0


def test_roles_change_only_where_that_is_short_against_a_step():
    assert set(forms(MADE, 60.0)) == {SPLIT, STREAMING}
    assert set(forms(replace(MADE, eta=1), 60.0)) == {SPLIT, STREAMING}
    found = regime(MADE, obstacles={STREAMING: "the batch is whole", TURNING: "the batch is whole"})
    assert set(found.step_s) == {SPLIT} and found.choice == SPLIT


def test_the_fastest_way_that_the_configuration_can_take_is_chosen():
    few = replace(MADE, train_gpus=2, train_s=640.0, throughput_s=200.0)  # too few trainers: engines have to help
    assert regime(few).choice == TURNING
    barred = regime(few, obstacles={TURNING: "an engine of 2 GPUs would train with one of them"})
    assert barred.choice == STREAMING and barred.obstacles[TURNING].startswith("an engine of 2 GPUs")


def test_a_user_is_told_what_helps_and_by_how_much():
    made = regime(MADE, changes_s=30.0)
    assert made.choice == STREAMING  # turning saves less than 5 % of that
    assert "17 %" in made.words
    assert regime(replace(MADE, eta=1, train_s=20.0)).choice == SPLIT
    slow = replace(MADE, rollout_s=900.0, longest_s=900.0, tool_s=600.0, needed_gpus=5)
    found = regime(slow)
    assert found.path_over_work == pytest.approx(910.0 / WORK_S) and "latency-bound" in found.words
    assert regime(replace(slow, eta=4)).path_over_work == pytest.approx(found.path_over_work / 5)


def test_roles_stay_where_one_trajectory_is_the_limit():
    seconds = {SPLIT: 100.0, STREAMING: 99.0, TURNING: 50.0}
    assert chosen(3.1, seconds, (SPLIT, STREAMING, TURNING)) == SPLIT
    assert chosen(2.9, seconds, (SPLIT, STREAMING, TURNING)) == TURNING


def test_a_way_stays_taken_until_it_is_worth_next_to_nothing():
    ways = (SPLIT, STREAMING)
    between = {SPLIT: 100.0, STREAMING: 100.0 * (1 - (WORTH_FRAC + STAYS_FRAC) / 2)}
    assert chosen(1.0, between, ways, SPLIT) == SPLIT and chosen(1.0, between, ways) == SPLIT
    assert chosen(1.0, between, ways, STREAMING) == STREAMING
    assert chosen(1.0, {SPLIT: 100.0, STREAMING: 99.0}, ways, STREAMING) == SPLIT
    assert chosen(1.0, {SPLIT: 100.0}, ways, STREAMING) == SPLIT  # no seconds of it


def choice(ways=WAYS, way="streaming", train_gpus=1):
    return WayChoice(WaySettings(ways, way, "not planned", train_gpus), 0, 16)


def step(complete_s=LATE, **given):
    values = {"step": 0, "complete_s": complete_s, "waves": ((1, 1.0), (3, 3.0)), "update_s": 0.5, "longest_s": 0.0}
    values |= {"rollout_gpus": 2.0, "rollout_gpu_s": 12.0, "change_s": 0.0}
    return StepMeasured(**(values | given))


def test_a_long_tail_is_streamed_and_groups_that_end_together_are_not():
    made = choice()
    told = made.measured(step())
    assert told is not None and told.way == made.way == "streaming" and made.streams and not made.turns
    assert "10.5 s a step, split 13.5 s" in told.reason
    assert made.measured(step()) is None  # as before
    told = made.measured(step(ALIKE, step=2))
    assert told is not None and told.way == "split" and not made.streams and told.reason.startswith("as step 2 was")
    assert made.measured(step(ALIKE)) is None


def test_engines_may_turn_where_that_is_worth_two_changes_and_no_trajectory_is_the_limit():
    busy = {"waves": ((4, 40.0),), "rollout_gpu_s": 18.0}
    made = choice()
    told = made.measured(step(change_s=0.5, **busy))
    assert told is not None and told.way == "turning" and made.turns and made.streams
    told = made.measured(step(change_s=60.0, **busy))
    assert told is not None and told.way == "streaming" and not made.turns  # changes take too long for the step
    told = choice().measured(step(rollout_gpus=30.0, rollout_gpu_s=30.0, change_s=0.1))
    assert told is not None and told.way == "streaming" and told.reason.endswith("; latency-bound, so roles stay")
    assert choice(WAYS[:2]).measured(step(change_s=0.5, **busy)).way == "streaming"


def test_a_wave_has_a_price_of_its_own():
    assert wave_price(((1, 1.5), (3, 3.5))) == pytest.approx((0.5, 1.0))
    assert wave_price(((4, 4.0),)) == pytest.approx((0.0, 1.0)) == wave_price(((2, 2.0), (2, 2.0)))
    assert wave_price(((4, 4.5),), 0.5) == pytest.approx((0.5, 1.0))  # known from steps before
    assert wave_price(((1, 4.0), (3, 2.0))) == pytest.approx((3.0, 0.0))  # never a gain by more groups
    dear = choice()
    dear.measured(step(waves=((1, 3.0), (3, 3.0)), complete_s=(1.0, 2.0, 3.0, 4.0)))
    assert dear.way == "split"  # a second wave costs as much as it hides


@given(
    complete_s=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=20).map(sorted), fixed_s=st.floats(0.0, 5.0),
    each_s=st.floats(0.0, 10.0), most=st.integers(1, 16),
)  # fmt: skip
def test_a_streamed_batch_never_ends_before_its_work_nor_long_after_one_that_waited(complete_s, fixed_s, each_s, most):
    groups, most = len(complete_s), min(most, len(complete_s))
    end_s = streamed_end_s(complete_s, fixed_s, each_s, most)
    held_s = complete_s[-1] + fixed_s + each_s * groups
    assert end_s >= complete_s[-1] + fixed_s + each_s - 1e-9
    assert end_s <= held_s + fixed_s * (most - 1) + 1e-9
    if most == 1:
        assert end_s == pytest.approx(held_s)


def test_the_state_survives_json():
    made = choice()
    made.measured(step())
    again = WayChoice()
    again.restore(json.loads(json.dumps(made.snapshot())))
    assert again.snapshot() == made.snapshot()
    assert again.measured(step(ALIKE)) == made.measured(step(ALIKE)) is not None
    with pytest.raises(KeyError):
        WayChoice().restore({"way": "split"})


def held():
    admission = Admission(0, 4, Waves(4))
    admission.ways = choice(("split", "streaming"), "split")
    commands = []
    for wave in range(4):
        commands += admission.wave_parked(0, wave)
    commands += admission.batch_parked(0) + admission.version_published(0)
    for group in range(3):
        commands += admission.group_committed(CommittedGroup(0, group, 0))
    return admission, commands


def test_waves_are_held_back_until_the_batch_is_complete_and_open_at_once_when_the_choice_changes():
    admission, commands = held()
    assert commands == []
    whole = admission.group_committed(CommittedGroup(0, 3, 0))
    assert isinstance(whole[0], OpenWave) and len(whole[0].members) == 4
    assert [len(each.members) for each in whole[1:4] if isinstance(each, OpenWave)] == [0, 0, 0]
    assert isinstance(whole[4], OpenBatch)

    admission, _ = held()
    told = admission.steps_measured(step())
    assert [type(each) for each in told] == [TakeSteps, OpenWave]
    assert told[1].members == ((0, 0), (0, 1), (0, 2))
