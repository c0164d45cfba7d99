from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import factories
from libra.config import config_from_dict
from libra.config.algorithms import ALGORITHMS, preset_values
from libra.errors import ConfigError, TrainError
from libra.graph.member_rows import member_rows
from libra.policy import StalenessPolicy, Verdict
from libra.train import TrainSettings
from libra.train.samples import sample_of
from libra.types import EndReason, FailureClass, TrajectoryId
from libra.worker.training import batch_rows
from libra.worker.training.batch_numbers import batch_stats, lags, spare_numbers
from libra.worker.training.batch_rows import SliceFetcher, lazy_batch, lengths, without_stale

BATCH, ETA = 6, 2
VERSIONS = st.lists(st.integers(0, BATCH), max_size=6).map(sorted)
GROUPS = st.lists(st.lists(st.tuples(VERSIONS, st.booleans()), min_size=2, max_size=3), min_size=1, max_size=4)


def trajectory(group, sample, versions, sound=True, **changes):
    """A prompt of two tokens, and a token of each version; its reward is its sample, unless told otherwise."""
    failure = FailureClass.NONE if sound else FailureClass.ENGINE
    return factories.trajectory(
        TrajectoryId(0, group, sample), versions=versions, failure=failure, **{"reward": float(sample)} | changes
    )


def rewarded(index, rewards, version=BATCH, sound=True):
    return [trajectory(index, sample, [version], sound, reward=reward) for sample, reward in enumerate(rewards)]


def judged(groups, over_age=Verdict.WAIT, **trainer):
    settings = config_from_dict({"trainer": trainer}).trainer
    paths = [Path(str(index)) for index in range(len(groups))]
    return member_rows(settings, groups, paths, BATCH, StalenessPolicy(ETA, over_age))


def spared(groups, most, over_age=Verdict.WAIT, **trainer):
    return judged(groups, over_age, train_prompts=most, prompts=16, **trainer)


def of_the_step(groups, rows, **options):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batch_rows, "read_group", lambda path: groups[int(path.name)])
        return batch_rows.members_of({"members": rows}, Path("groups"), **{"of_the_step": True} | options)


@given(GROUPS, st.sampled_from([Verdict.DROP, Verdict.MASK, Verdict.CORRECT]))
def test_exactly_what_the_verdict_says_trains_and_is_counted(drawn, over_age):
    groups = [
        [trajectory(index, sample, versions, sound) for sample, (versions, sound) in enumerate(group)]
        for index, group in enumerate(drawn)
    ]
    rows = judged(groups, over_age)
    members = of_the_step(groups, rows)
    trains = {}  # the versions of its tokens in the step
    for index, group in enumerate(drawn):
        late = any(versions and sound and BATCH - versions[0] > ETA for versions, sound in group)
        assert rows[index].get("over_age") == (over_age if late else None)
        for sample, (versions, sound) in enumerate(group):
            kept = [v for v in versions if over_age is not Verdict.MASK or not late or BATCH - v <= ETA]
            left_out = late and (over_age is Verdict.DROP or (over_age is Verdict.MASK and not kept))
            if sound and not left_out:
                trains[index, sample] = kept
    trained = [(t.trajectory_id, t.weight_version[t.is_action]) for t in members if t.failure.trains]
    assert {(at.group, at.sample): versions.tolist() for at, versions in trained} == trains
    for member in members:
        if member.num_action_tokens and member.failure.trains:
            assert sample_of(member, BATCH).num_actions == member.num_action_tokens
    stats = batch_stats(groups, rows, BATCH)
    assert stats["lag_max"] == max((BATCH - v for versions in trains.values() for v in versions), default=0)
    assert stats.get("over_age", 0) == sum("over_age" in row for row in rows)
    if over_age is not Verdict.CORRECT:
        assert stats["lag_max"] <= ETA


def test_the_reward_of_masked_tokens_stays_in_the_baseline_and_that_of_a_dropped_group_leaves_all():
    groups = [[trajectory(0, 0, [0, 0]), trajectory(0, 1, [0, 5])], [trajectory(1, 0, [5]), trajectory(1, 1, [6])]]
    fresh = judged(groups, Verdict.CORRECT)
    masked, dropped = judged(groups, Verdict.MASK), judged(groups, Verdict.DROP)
    assert masked[0]["advantages"] == fresh[0]["advantages"] and masked[0]["trains"] == [False, True]
    assert masked[0]["from_version"] == BATCH - ETA
    assert dropped[0]["advantages"] == [0.0, 0.0] and dropped[0]["trains"] == [False, False]
    assert dropped[1] == fresh[1] == masked[1]


def test_a_batch_that_should_have_waited_takes_no_step():
    with pytest.raises(TrainError, match="lag 4"):
        judged([[trajectory(0, 0, [2, 6]), trajectory(0, 1, [6])]], Verdict.WAIT)


def test_rows_that_come_from_other_workers_are_masked_as_those_that_are_read():
    group = [trajectory(0, 0, [0, 0, 6]), trajectory(0, 1, [0])]
    (row,) = judged([group], Verdict.MASK)
    row |= {"rows": [str(t.trajectory_id) for t in group], "block": None}
    row["lengths"] = lengths([without_stale(t, row) for t in group])
    batch = {"members": [row]}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batch_rows, "read_group", lambda path: group)
        fetcher = SliceFetcher(batch, SimpleNamespace(groups_dir=Path("groups"), run="demo", secret=""))
        lazy = lazy_batch(batch, fetcher)
        (fetched,) = fetcher([fact.row for fact in lazy.facts])
    assert fetched.is_action.tolist() == [False, False, False, False, True]
    assert [(fact.num_tokens, fact.num_actions) for fact in lazy.facts] == [(4, 1)]


def test_filters_leave_members_out_of_the_step_and_nowhere_else():
    groups = [
        [trajectory(0, 0, [6, 6]), trajectory(0, 1, [6], end_reason=EndReason.LENGTH)],
        rewarded(1, [1.0, 1.0]),
        [trajectory(2, 0, [], False, reward=float("nan")), trajectory(2, 1, [6])],
    ]
    rows = judged(groups, drop_uniform_groups=True, drop_truncated=True)
    every = of_the_step(groups, rows, of_the_step=False)
    assert len(every) == 6 and all(np.isfinite(one.advantage) for one in every)
    kept = of_the_step(groups, rows)
    ids = [(t.trajectory_id.group, t.trajectory_id.sample) for t in kept]
    assert ids == [(0, 0), (2, 0)]  # a failure is excluded later
    assert len(of_the_step(groups, judged(groups))) == 6


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_the_first_groups_with_a_signal_train_and_no_more(signals, most):
    rows = spared([rewarded(index, [0.0, float(has)]) for index, has in enumerate(signals)], most)
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


def test_groups_that_stand_by_are_in_no_statistic_of_the_whole_batch():
    groups = [rewarded(0, [1.0, 1.0]), rewarded(1, [0.0, 1.0]), rewarded(2, [0.0, 9.0], version=BATCH - 1)]
    rows = spared(groups, 1, algorithm="reinforce_pp_baseline")
    alone = spared([groups[1]], 1, algorithm="reinforce_pp_baseline")
    assert rows[1]["advantages"] == alone[0]["advantages"]  # the scale of the batch is of what trains
    assert lags(groups, rows, BATCH).tolist() == [0, 0]
    assert spare_numbers(rows, None) == {}


def test_what_is_dropped_for_its_age_or_failed_is_replaced_too():
    signal = [0.0, 1.0]
    gone = [rewarded(0, signal, version=2), rewarded(1, signal, sound=False)]
    rows = spared([*gone, rewarded(2, signal), rewarded(3, signal)], 1, Verdict.DROP)
    assert [row.get("spare") for row in rows] == ["no signal", "no signal", None, "not needed"]
    assert rows[0]["over_age"] == "drop" and rows[2]["trains"] == [True, True]


@pytest.mark.parametrize(("trainer", "fix"), [
    ({"prompts": 4, "train_prompts": 8}, "trainer.prompts=16"),
    ({"train_prompts": 2, "group_size": 1, "normalize_std": False}, "trainer.group_size=8"),
    ({"train_prompts": 2, "streaming": "on"}, "trainer.streaming=off"),
    ({"train_prompts": 2, "late": "correct"}, "trainer.late=wait"),
])  # fmt: skip
def test_what_cannot_be_chosen_is_refused(trainer, fix):
    with pytest.raises(ConfigError, match=fix):
        config_from_dict({"trainer": trainer})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_of_the_configuration_makes_settings_of_a_replica(name):
    teacher = ["distil.teacher=t"] if name == "opd" else []
    settings = TrainSettings.of_run(config_from_dict({}, [f"trainer.algorithm={name}", *teacher]))
    assert settings.loss == ALGORITHMS[name].preset.loss and settings.loss_args == preset_values(name)["loss_args"]
