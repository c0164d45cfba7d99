"""Engines that train while the tail runs: which turn, when, and when they return."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import ConfigError
from libra.facts import Turned
from libra.policy.tail import OpenStep, TurningEngine, TurningRule

RULE = TurningRule(trajectories_per_gpu=4.0, min_gain_s=10.0, to_training_s=8.0, to_rollout_s=10.0)
DOING = st.sampled_from(list(Turned))


def engines(*residents, gpus=2):
    return [TurningEngine(f"e{i}", gpus, Turned.ROLLOUT, count) for i, count in enumerate(residents)]


def step(backlog_gpu_s=1e4, core_gpus=2, is_full=False, waits=True):
    return OpenStep(backlog_gpu_s, core_gpus, is_full, waits)


def test_the_thinnest_engines_turn_while_the_others_hold_what_is_open():
    turns = RULE.turns(engines(5, 1, 2, 6), 14, step())
    assert [(turn.worker, turn.to) for turn in turns] == [("e1", Turned.TRAINING), ("e2", Turned.TRAINING)]
    assert RULE.turns(engines(5, 1, 2, 6), 25, step()) == ()


def test_an_engine_turns_only_for_a_backlog_that_is_worth_it():
    assert [turn.worker for turn in RULE.turns(engines(0, 1, 0, 0), 1, step(backlog_gpu_s=50.0))] == ["e0"]
    assert RULE.turns(engines(1, 1), 2, step(backlog_gpu_s=39.0)) == ()
    assert RULE.turns(engines(1, 1), 2, None) == ()


def test_engines_return_when_more_is_open_than_the_others_should_have():
    turned = [TurningEngine("e0", 2, Turned.TRAINING, 0), TurningEngine("e1", 2, Turned.TRAINING, 0), *engines(8)]
    assert [turn.worker for turn in RULE.turns(turned, 9, step())] == ["e0"]
    assert [turn.to for turn in RULE.turns(turned, 30, None)] == [Turned.ROLLOUT] * 2
    assert RULE.turns(turned, 8, None) == ()


def test_all_train_at_the_end_if_that_is_over_sooner_changes_included():
    rolling = engines(0, 0)
    assert len(RULE.turns(rolling, 0, step(100.0, is_full=True))) == 2  # 50 s alone, 8 + 84 / 6 + 10 s together
    assert RULE.turns(rolling, 0, step(40.0, is_full=True)) == ()  # 20 s alone, 8 + 24 / 6 + 10 s together
    assert len(RULE.turns(rolling, 0, step(40.0, is_full=True, waits=False))) == 2
    assert RULE.turns(rolling, 0, step(1e4)) == ()  # more groups come
    assert len(RULE.turns(rolling, 0, step(1.0, core_gpus=0, is_full=True))) == 2  # nobody else trains


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), DOING, st.integers(0, 20)), min_size=1, max_size=12),
    st.integers(0, 300), st.floats(0, 1e5), st.integers(0, 16), st.booleans(), st.booleans(),
)  # fmt: skip
def test_something_that_is_open_is_never_left_without_an_engine_and_nothing_turns_back_at_once(
    kinds, num_open, backlog, core, is_full, waits
):
    states = [TurningEngine(f"e{i}", *kind) for i, kind in enumerate(kinds)]
    turns = {turn.worker: turn.to for turn in RULE.turns(states, num_open, step(backlog, core, is_full, waits))}
    between = {Turned.TRAINING: Turned.TO_TRAINING, Turned.ROLLOUT: Turned.TO_ROLLOUT}
    after = [state._replace(doing=between[turns[state.name]]) if state.name in turns else state for state in states]
    for state in states:
        if state.name in turns:
            assert state.doing is (Turned.ROLLOUT if turns[state.name] is Turned.TRAINING else Turned.TRAINING)
    generates = (Turned.ROLLOUT, Turned.TO_ROLLOUT)
    if num_open and any(state.doing in generates for state in states):
        assert any(state.doing in generates for state in after)
    settled = [state._replace(doing=Turned.TRAINING) if state.doing is Turned.TO_TRAINING else state for state in after]
    if num_open and Turned.TRAINING in turns.values():
        assert RULE.turns(settled, num_open, None) == ()


def test_a_rule_that_means_nothing_is_refused():
    for field, value in (("trajectories_per_gpu", 0.0), ("min_gain_s", -1.0)):
        with pytest.raises(ConfigError, match=field):
            TurningRule(**{field: value})
