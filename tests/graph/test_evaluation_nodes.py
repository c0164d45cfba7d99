import math

import pytest

import factories
from libra.config import config_from_dict
from libra.graph.evaluation_nodes import evaluation_outcome, evaluation_path, read_evaluation
from libra.seals import sealed_text
from libra.types import FailureClass
from libra.worker.run_spec import RunSpec


def test_failures_are_trajectories_that_ended_so_and_left_out_those_without_a_reward():
    ended = {FailureClass.NONE: 1.0, FailureClass.POLICY: 0.0, FailureClass.TOOL: math.nan}
    trajectories = [factories.trajectory(failure=failure, reward=reward) for failure, reward in ended.items()]
    outcome = evaluation_outcome(3, trajectories)
    assert (outcome["num"], outcome["failures"], outcome["left_out"], outcome["reward"]) == (3, 2, 1, 0.5)


@pytest.mark.parametrize(
    ("written", "read"),
    [({"failures": 2, "left_out": 1}, {"failures": 2, "left_out": 1}), ({"failures": 1}, {"left_out": 1})],
)
def test_the_count_of_an_older_file_is_read_under_its_name_of_today(tmp_path, written, read):
    spec = RunSpec("demo", 0, tmp_path, "", config_from_dict({}))
    path = evaluation_path(spec, 3)
    path.parent.mkdir()
    path.write_text(sealed_text({"version": 3, "num": 3, "reward": 0.5, "bins": {}} | written))
    found = read_evaluation(spec, 3)
    assert found is not None
    assert {name: found[name] for name in ("failures", "left_out") if name in found} == read
