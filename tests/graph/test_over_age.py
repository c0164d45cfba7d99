"""What a step leaves out for its age: whole groups, tokens, or nothing, and what still counts in its denominators."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.config import config_from_dict
from libra.errors import TrainError
from libra.graph.batch_nodes import batch_stats
from libra.graph.member_rows import member_rows
from libra.policy import StalenessPolicy, Verdict
from libra.train.samples import sample_of
from libra.types import EndReason, FailureClass, Prompt, Trajectory, TrajectoryId
from libra.worker import batch_rows
from libra.worker.batch_rows import SliceFetcher, lazy_batch, lengths, without_stale

BATCH, ETA = 6, 2
TRAINER = config_from_dict({}).trainer
VERSIONS = st.lists(st.integers(0, BATCH), max_size=6).map(sorted)
GROUPS = st.lists(st.lists(st.tuples(VERSIONS, st.booleans()), min_size=2, max_size=3), min_size=1, max_size=4)


def trajectory(group: int, sample: int, versions: list[int], sound: bool = True) -> Trajectory:
    """A prompt of two tokens, and a token of each version."""
    made = np.array([-1, -1, *versions], np.int32)
    return Trajectory(
        TrajectoryId(0, group, sample), Prompt("p", ()), np.arange(len(made), dtype=np.int32), made >= 0,
        np.zeros(len(made), np.float32), made, made.copy(), turns=[], end_reason=EndReason.ANSWERED,
        failure=FailureClass.NONE if sound else FailureClass.ENGINE, reward=float(sample),
    )  # fmt: skip


def judged(groups: list[list[Trajectory]], over_age: Verdict) -> list[dict[str, Any]]:
    paths = [Path(str(index)) for index in range(len(groups))]
    return member_rows(TRAINER, groups, paths, BATCH, StalenessPolicy(ETA, over_age))


@given(GROUPS, st.sampled_from([Verdict.DROP, Verdict.MASK, Verdict.CORRECT]))
def test_exactly_what_the_verdict_says_trains_and_is_counted(
    drawn: list[list[tuple[list[int], bool]]], over_age: Verdict
) -> None:
    groups = [
        [trajectory(index, sample, versions, sound) for sample, (versions, sound) in enumerate(group)]
        for index, group in enumerate(drawn)
    ]
    rows = judged(groups, over_age)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batch_rows, "read_group", lambda path: groups[int(path.name)])
        members = batch_rows.members_of({"members": rows}, Path("groups"), of_the_step=True)
    trains: dict[tuple[int, int], list[int]] = {}  # the versions of its tokens in the step
    for index, group in enumerate(drawn):
        late = any(versions and sound and BATCH - versions[0] > ETA for versions, sound in group)
        assert rows[index].get("over_age") == (over_age if late else None)
        for sample, (versions, sound) in enumerate(group):
            kept = [v for v in versions if over_age is not Verdict.MASK or not late or BATCH - v <= ETA]
            left_out = late and (over_age is Verdict.DROP or (over_age is Verdict.MASK and not kept))
            if sound and not left_out:
                trains[index, sample] = kept
    found = {
        (t.trajectory_id.group, t.trajectory_id.sample): t.weight_version[t.is_action].tolist()
        for t in members
        if t.failure.trains
    }
    assert found == trains
    for member in members:
        if member.num_action_tokens and member.failure.trains:
            assert sample_of(member, BATCH).num_actions == member.num_action_tokens
    stats = batch_stats(groups, rows, BATCH)
    expected = [BATCH - v for versions in trains.values() for v in versions]
    assert stats["lag_max"] == max(expected, default=0)
    assert stats.get("over_age", 0) == sum("over_age" in row for row in rows)
    if over_age is not Verdict.CORRECT:
        assert stats["lag_max"] <= ETA


def test_the_reward_of_masked_tokens_stays_in_the_baseline_and_that_of_a_dropped_group_leaves_all() -> None:
    groups = [[trajectory(0, 0, [0, 0]), trajectory(0, 1, [0, 5])], [trajectory(1, 0, [5]), trajectory(1, 1, [6])]]
    fresh = judged(groups, Verdict.CORRECT)
    masked, dropped = judged(groups, Verdict.MASK), judged(groups, Verdict.DROP)
    assert masked[0]["advantages"] == fresh[0]["advantages"] and masked[0]["trains"] == [False, True]
    assert masked[0]["from_version"] == BATCH - ETA
    assert dropped[0]["advantages"] == [0.0, 0.0] and dropped[0]["trains"] == [False, False]
    assert dropped[1] == fresh[1] == masked[1]


def test_a_batch_that_should_have_waited_takes_no_step() -> None:
    with pytest.raises(TrainError, match=r"batch 6: a token has lag 4, above run.eta=2; no step was taken on it"):
        judged([[trajectory(0, 0, [2, 6]), trajectory(0, 1, [6])]], Verdict.WAIT)


def test_rows_that_come_from_other_workers_are_masked_as_those_that_are_read() -> None:
    group = [trajectory(0, 0, [0, 0, 6]), trajectory(0, 1, [0])]
    (row,) = judged([group], Verdict.MASK)
    row |= {"rows": [str(t.trajectory_id) for t in group], "block": None}
    row["lengths"] = lengths([without_stale(t, row) for t in group])
    batch = {"members": [row]}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batch_rows, "read_group", lambda path: group)
        fetcher = SliceFetcher(batch, "me", SimpleNamespace(groups_dir=Path("groups"), run="demo", secret=""))  # type: ignore[arg-type]
        lazy = lazy_batch(batch, fetcher)
        (fetched,) = fetcher([fact.row for fact in lazy.facts])
    assert fetched.is_action.tolist() == [False, False, False, False, True]
    assert [(fact.num_tokens, fact.num_actions) for fact in lazy.facts] == [(4, 1)]
