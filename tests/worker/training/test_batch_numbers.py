"""The spread of rewards within groups, and why nothing can be learned from a batch."""

import math

import pytest

from factories import trajectory
from libra.types import EndReason, FailureClass, TrajectoryId
from libra.worker.training.batch_numbers import MAX_CAUSE_CHARS, signal_numbers
from libra.worker.trajectory.trajectory_state import CONTEXT_FULL

NAN = math.nan


def member(group, sample, reward):
    """One that failed where ``reward`` is NaN."""
    failed = math.isnan(reward)
    failure = {"failure": FailureClass.TOOL, "failure_detail": "no  such\nhost " + "x" * 500} if failed else {}
    return trajectory(TrajectoryId(0, group, sample), lengths=(1, 2), reward=reward, **failure)


def numbers(*rewards, advantage=0.0, trains=True):
    members = [member(g, s, reward) for g, group in enumerate(rewards) for s, reward in enumerate(group)]
    rows = [{"advantages": [advantage] * len(group), "trains": [trains] * len(group)} for group in rewards]
    return signal_numbers(members, rows)


@pytest.mark.parametrize(("rewards", "without", "equal_frac", "cause"), [
    ([[0.0, 1.0], [1.0, 1.0]], 1, 0.5, "no group has rewards that differ (0 to 1 between groups)"),
    ([[0.5, 0.5], [0.5, 0.5]], 2, 1.0, "all 4 rewards are 0.5"),
    ([[1.0, NAN], [NAN, NAN]], 2, 0.0, "no group has two valid trajectories to compare; the first failure: tool:"),
    ([[NAN], [NAN]], 0, 0.0, "none of 2 trajectories is valid; the first failure: tool: no such host x"),
    ([[0.0], [1.0]], 0, 0.0, "no group has two valid trajectories to compare"),
    ([], 0, 0.0, "none of 0 trajectories is valid"),
])  # fmt: skip
def test_groups_without_signal_and_the_cause(rewards, without, equal_frac, cause):
    found = numbers(*rewards)
    assert (found["groups_without_signal"], found["frac_reward_zero_std"]) == (without, equal_frac)
    assert found["no_signal"].startswith(cause) and len(found["no_signal"]) < MAX_CAUSE_CHARS + 100
    assert "\n" not in found["no_signal"]


@pytest.mark.parametrize(
    ("detail", "typed"),
    [("turn 1 was cut at its token limit", "max_new_tokens=4"), (CONTEXT_FULL, "max_context_tokens=6")],
)
def test_members_that_were_cut_are_told_with_the_limit(detail, typed):
    how = {"end_reason": EndReason.LENGTH, "failure": FailureClass.POLICY, "failure_detail": detail}
    how["turns"] = [{"generated_tokens": 2}]
    cut = [trajectory(TrajectoryId(0, 0, n), lengths=(1, 2), reward=0.0, **how) for n in range(2)]
    cause = signal_numbers([*cut, member(0, 2, 0.0)], [{"advantages": [0.0] * 3, "trains": [True] * 3}])["no_signal"]
    assert cause.startswith("all 3 rewards are 0; 2 of them were cut by rollout.")
    assert cause.endswith(f"rollout.{typed}")


def test_calls_of_no_tool_are_told_with_the_name_that_is_most_often_called():
    names = ("calculator", "add", "calculator")
    turns = [{"generated_tokens": 2, "tool": name, "status": "malformed"} for name in names]
    lost = trajectory(TrajectoryId(0, 0, 0), lengths=(1, 2), reward=0.0, turns=turns)
    cause = signal_numbers([lost, member(0, 1, 0.0)], [{"advantages": [0.0] * 2, "trains": [True] * 2}])["no_signal"]
    assert cause == "all 2 rewards are 0; 3 turns called no tool that is there, most often 'calculator'"


@pytest.mark.parametrize(("advantage", "trains", "says"), [(0.5, True, False), (0.5, False, True), (1e-9, True, True)])
def test_one_advantage_that_trains_is_a_signal(advantage, trains, says):
    assert bool(numbers([0.0, 1.0], advantage=advantage, trains=trains)["no_signal"]) == says


def test_the_spread_is_a_mean_over_groups_that_can_be_compared():
    found = numbers([0.0, 1.0, NAN], [0.25, 0.75], [1.0, NAN])
    assert found["reward_std"] == pytest.approx((0.5 + 0.25) / 2)
    assert (found["reward_group_min"], found["reward_group_max"]) == (0.125, 0.875)
    assert math.isnan(numbers([1.0])["reward_std"])
