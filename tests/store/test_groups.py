"""Groups are written once and come back whole."""

import numpy as np
import pytest

from libra.errors import RecordExists, StoreError
from libra.store.run_records import group_path, read_group, write_group
from libra.types import EndReason, FailureClass, Prompt


def test_every_field_of_every_trajectory_comes_back(tmp_path, make_trajectory, assert_same):
    group = [
        make_trajectory(3, 5, 0),
        make_trajectory(3, 5, 1, num_tokens=0, num_turns=0, end_reason=EndReason.FAILURE, failure=FailureClass.TOOL),
        make_trajectory(
            3, 5, 2, reward=float("nan"), failure=FailureClass.WORKER, failure_detail="a\nb", retried="engine"
        ),
        make_trajectory(3, 5, 3, experts=(2, 3)),
    ]
    path = write_group(tmp_path / "groups", 3, 5, group)
    assert path == group_path(tmp_path / "groups", 3, 5)
    for got, expected in zip(read_group(path), group, strict=True):
        assert_same(got, expected)


def test_a_group_is_written_once(tmp_path, make_trajectory, assert_same):
    first, second = make_trajectory(seed=1), make_trajectory(seed=2)
    path = write_group(tmp_path, 0, 0, [first])
    with pytest.raises(RecordExists, match=r"train-000000-000000.group"):
        write_group(tmp_path, 0, 0, [second])
    assert_same(read_group(path)[0], first)
    other = write_group(tmp_path, 0, 0, [make_trajectory(split="eval")])
    assert [read_group(each)[0].trajectory_id.split for each in (path, other)] == ["train", "eval"]


def test_strangers_doubles_and_empty_groups_are_refused(tmp_path, make_trajectory):
    for trajectories in (
        [],
        [make_trajectory(0, 1, 0)],
        [make_trajectory(0, 0, 0), make_trajectory(0, 0, 0)],
        [make_trajectory(0, 0, 0), make_trajectory(0, 0, 1, "eval")],
        [make_trajectory(prompt=Prompt("q7", (), {"answer": np.zeros(2)}))],  # not JSON
    ):
        with pytest.raises(StoreError):
            write_group(tmp_path, 0, 0, trajectories)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_torn_group_is_named(tmp_path, make_trajectory):
    with pytest.raises(StoreError, match=r"train-000000-000001.group"):
        read_group(group_path(tmp_path, 0, 1))
    path = write_group(tmp_path, 0, 0, [make_trajectory()])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"train-000000-000000.group"):
        read_group(path)
