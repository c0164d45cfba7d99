"""Groups that stand by: which train, in the order of the batch, and that the others count in nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.config import config_from_dict
from libra.errors import ConfigError
from libra.graph.batch_nodes import lags
from libra.graph.member_rows import member_rows, spare_numbers
from libra.policy import StalenessPolicy, Verdict
from libra.types import EndReason, FailureClass, Prompt, Trajectory, TrajectoryId


def group(index: int, rewards: list[float], version: int = 5, sound: bool = True) -> list[Trajectory]:
    made = np.array([-1, version], np.int32)
    return [
        Trajectory(
            TrajectoryId(0, index, sample), Prompt("p", ()), np.arange(2, dtype=np.int32), made >= 0, np.zeros(2, np.float32), made,
            made.copy(), turns=[], end_reason=EndReason.ANSWERED, reward=reward,
            failure=FailureClass.NONE if sound else FailureClass.ENGINE,
        )
        for sample, reward in enumerate(rewards)
    ]  # fmt: skip


def rows_of(
    groups: list[list[Trajectory]], most: int, over_age: Verdict = Verdict.WAIT, **keys: Any
) -> list[dict[str, Any]]:
    trainer = config_from_dict({"trainer": {"train_prompts": most, "prompts": 16, **keys}}).trainer
    return member_rows(trainer, groups, [Path()] * len(groups), 5, StalenessPolicy(1, over_age))


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_the_first_groups_with_a_signal_train_and_no_more(signals: list[bool], most: int) -> None:
    rows = rows_of([group(index, [0.0, float(has)]) for index, has in enumerate(signals)], most)
    trained = [index for index, row in enumerate(rows) if all(row["trains"])]
    assert trained == [index for index, has in enumerate(signals) if has][:most]
    for index, row in enumerate(rows):
        if index not in trained:
            assert row["spare"] == ("not needed" if signals[index] else "no signal")
            assert not any(row["trains"]) and not any(row["advantages"])
    numbers = spare_numbers(rows, most)
    assert numbers["groups_trained"] == len(trained)
    assert numbers["groups_replaced"] == sum(index >= most for index in trained)
    assert numbers["groups_spare"] == sum(signals) - len(trained)


def test_groups_that_stand_by_are_in_no_statistic_of_the_whole_batch() -> None:
    groups = [group(0, [1.0, 1.0]), group(1, [0.0, 1.0]), group(2, [0.0, 9.0], version=4)]
    rows, alone = (
        rows_of(groups, 1, algorithm="reinforce_pp_baseline"),
        rows_of([groups[1]], 1, algorithm="reinforce_pp_baseline"),
    )
    assert rows[1]["advantages"] == alone[0]["advantages"]  # the scale of the batch is of what trains
    assert lags(groups, rows, 5).tolist() == [0, 0]
    assert spare_numbers(rows, None) == {}


def test_what_is_dropped_for_its_age_or_failed_is_replaced_too() -> None:
    groups = [
        group(0, [0.0, 1.0], version=2),
        group(1, [0.0, 1.0], sound=False),
        group(2, [0.0, 1.0]),
        group(3, [0.0, 1.0]),
    ]
    rows = rows_of(groups, 1, Verdict.DROP)
    assert [row.get("spare") for row in rows] == ["no signal", "no signal", None, "not needed"]
    assert rows[0]["over_age"] == "drop" and rows[2]["trains"] == [True, True]


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        ({"prompts": 4, "train_prompts": 8}, "type trainer.prompts=16"),
        ({"train_prompts": 2, "group_size": 1, "normalize_std": False}, "type trainer.group_size=8"),
        ({"train_prompts": 2, "streaming": "on"}, "type trainer.streaming=off"),
        ({"train_prompts": 2, "late": "correct"}, "type trainer.late=wait"),
    ],
)
def test_what_cannot_be_chosen_is_refused(keys: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix.replace(".", r"\.")):
        config_from_dict({"trainer": keys})
