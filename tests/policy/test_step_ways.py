"""What bounds a step and how to take it: closed forms, the choice between them, and what the user is told."""

from dataclasses import replace

import pytest

from libra.policy.step_ways import (
    COLOCATED,
    SPLIT,
    STAYS_FRAC,
    STREAMING,
    TURNING,
    WORTH_FRAC,
    StepParts,
    chosen,
    forms,
    regime,
)

ROLLOUT_S, TRAIN_S, UPDATE_S = 300.0, 160.0, 10.0
MADE = StepParts(16, 8, 0, ROLLOUT_S, TRAIN_S, UPDATE_S, throughput_s=280.0, longest_s=100.0)
WORK_S = (280.0 * 8 + TRAIN_S * 8) / 16


def test_the_forms_of_a_synchronous_step():
    found = forms(MADE, 18.8)
    assert found == pytest.approx(
        {
            SPLIT: 470.0,
            STREAMING: ROLLOUT_S + TRAIN_S / 2 + UPDATE_S,
            COLOCATED: 140.0 + 20.0 + 80.0 + UPDATE_S + 18.8,
            TURNING: ROLLOUT_S + TRAIN_S / 4 + UPDATE_S + 18.8,
        }
    )
    assert MADE.path_over_work == pytest.approx((100.0 + UPDATE_S) / WORK_S)
    measured = forms(replace(MADE, left_s=10.0), 18.8)
    assert measured[STREAMING] == pytest.approx(ROLLOUT_S + 10.0 + UPDATE_S) and measured[SPLIT] == found[SPLIT]


def test_the_forms_of_steps_that_overlap():
    later = forms(replace(MADE, eta=1, throughput_s=100.0), 18.8)
    assert later == pytest.approx(
        {
            SPLIT: (ROLLOUT_S + TRAIN_S + UPDATE_S) / 2,
            STREAMING: (ROLLOUT_S + TRAIN_S / 2 + UPDATE_S) / 2,
            TURNING: (ROLLOUT_S + TRAIN_S / 4 + UPDATE_S) / 2 + 18.8,
        }
    )
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
    assert set(found.step_s) == {SPLIT, COLOCATED} and found.choice == SPLIT


def test_the_fastest_way_that_the_configuration_can_take_is_chosen():
    few = replace(MADE, train_gpus=2, train_s=640.0, throughput_s=200.0)  # too few trainers: engines have to help
    found = regime(few)
    assert found.choice == TURNING
    barred = regime(few, obstacles={TURNING: "an engine of 2 GPUs would train with one of them"})
    assert barred.choice == STREAMING and barred.obstacles[TURNING].startswith("an engine of 2 GPUs")


def test_a_user_is_told_what_helps_and_by_how_much():
    made = regime(MADE, changes_s=30.0)
    assert made.choice == STREAMING  # turning saves less than 5 % of that
    assert min(made.step_s, key=lambda way: made.step_s[way]) == COLOCATED and "17 %" in made.words
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
