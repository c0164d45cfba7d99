import math

import factories
from libra.graph.batch_nodes import evaluation_outcome
from libra.types import FailureClass


def test_failures_are_trajectories_that_ended_so_and_left_out_those_without_a_reward():
    ended = {FailureClass.NONE: 1.0, FailureClass.POLICY: 0.0, FailureClass.TOOL: math.nan}
    trajectories = [factories.trajectory(failure=failure, reward=reward) for failure, reward in ended.items()]
    outcome = evaluation_outcome(3, trajectories)
    assert (outcome["num"], outcome["failures"], outcome["left_out"], outcome["reward"]) == (3, 2, 1, 0.5)
