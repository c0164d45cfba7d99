"""A trajectory's state from its records: phases, ends, and the arrays the store and the trainer read."""

import numpy as np
import pytest

from libra.store.quantum_records import ActionRecord
from libra.types import (
    EndReason,
    FailureClass,
    Phase,
    Prompt,
    StopReason,
    ToolCall,
    ToolReturn,
    ToolStatus,
    TrajectoryId,
    TurnOutput,
)
from libra.worker.trajectory.trajectory_state import (
    TrajectoryRules,
    TrajectoryState,
    end_record,
    failure_record,
    generation_record,
)

PROMPT = Prompt("train-0", ({"role": "user", "content": "?"},), {"answer": 3})
CALL = ToolCall("calculator", {"expression": "1 + 2"})


def fresh(**limits):
    rules = TrajectoryRules(**({"max_turns": 3, "max_context_tokens": 100} | limits))
    return TrajectoryState(TrajectoryId(0, 1, 2), PROMPT, rules)


def output(ids, version=0, stop=StopReason.STOP):
    n = len(ids)
    return TurnOutput(
        np.array(ids, np.int32), -np.arange(1, n + 1, dtype=np.float32), np.full(n, version, np.int32),
        np.full(n, version, np.int32), stop,
    )  # fmt: skip


def generated(turn, ids, calls=(), first=None, **kw):
    prompt_ids = None if first is None else np.array(first, np.int32)
    return generation_record(turn, prompt_ids, output(ids, **kw), f"text {turn}", calls)


def acted(turn, ids, status=ToolStatus.OK):
    returns = (ToolReturn("calculator", status, "3", 0.25, 1),)
    return ActionRecord(turn=turn, returns=returns, observation_ids=np.array(ids, np.int32))


def test_phases_alternate_until_a_turn_without_a_call_and_arrays_line_up_with_tokens():
    state = fresh()
    assert state.phase is Phase.ROLLOUT
    state.apply(generated(0, [10, 11], (CALL,), first=[1, 2, 3]))
    assert state.phase is Phase.TOOL and state.attempt.calls == (CALL,)
    state.apply(acted(0, [20], ToolStatus.TIMEOUT))
    assert state.phase is Phase.ROLLOUT
    assert state.attempt.context_ids.tolist() == [1, 2, 3, 10, 11, 20]
    state.apply(generated(1, [12], version=4))
    assert (state.phase, state.end, state.failure, state.quanta) == (None, EndReason.ANSWERED, FailureClass.NONE, 3)
    t = state.trajectory(epoch=5)
    assert t.token_ids.tolist() == [1, 2, 3, 10, 11, 20, 12]
    assert t.is_action.tolist() == [False] * 3 + [True] * 2 + [False, True]
    assert t.behaviour_logprob.tolist() == [0, 0, 0, -1, -2, 0, -1]
    assert t.weight_version.tolist() == [-1, -1, -1, 0, 0, -1, 4]
    assert (t.oldest_version, t.epoch, t.num_action_tokens) == (0, 5, 3)
    assert [row["prompt_tokens"] for row in t.turns] == [3, 6]
    assert [row["status"] for row in t.turns] == ["timeout", ""]
    assert sum(row["generated_tokens"] + row["observation_tokens"] for row in t.turns) + 3 == len(t.token_ids)
    episode = state.episode()
    assert [turn.text for turn in episode.turns] == ["text 0", "text 1"]
    assert [turn.num_tokens for turn in episode.turns] == [2, 1] and episode.num_tokens == 3
    assert episode.turns[0].returns[0].status is ToolStatus.TIMEOUT and episode.answer == "text 1"


@pytest.mark.parametrize(
    ("records", "limits", "end", "failure"),
    [
        ([generated(0, [9], (CALL,), first=[1], stop=StopReason.LENGTH)], {}, EndReason.LENGTH, FailureClass.POLICY),
        ([generated(0, [9], (CALL,), first=[1])], {"max_turns": 1}, EndReason.MAX_TURNS, FailureClass.POLICY),
        ([generated(0, [9], (CALL,), first=[1]), acted(0, [7, 7])], {"max_context_tokens": 4}, EndReason.LENGTH,
         FailureClass.POLICY),
        ([failure_record(FailureClass.ENGINE, "boom")], {}, EndReason.FAILURE, FailureClass.ENGINE),
    ],
)  # fmt: skip
def test_how_a_trajectory_ends(records, limits, end, failure):
    state = fresh(**limits)
    for record in records:
        state.apply(record)
    assert (state.phase, state.end, state.failure) == (None, end, failure)
    assert failure.trains is (failure is FailureClass.POLICY)


def failed(failure):
    return failure_record(failure, "boom")


@pytest.mark.parametrize("failure", ["tool", "timeout", "worker", "environment"])
def test_after_any_other_failure_nothing_of_the_draw_is_left(failure):
    state = fresh(resample=1)
    state.apply(generated(0, [10, 11], (CALL,), first=[1, 2, 3]))
    state.apply(failed(FailureClass(failure)))
    assert (state.phase, state.attempt.turns, state.attempt.number, state.quanta, state.attempt.calls) == (
        Phase.ROLLOUT, 0, 1, 2, (),
    )  # fmt: skip
    assert len(state.attempt.context_ids) == state.attempt.num_context_tokens == 0
    state.apply(generated(0, [12], first=[1, 2, 3]))
    t = state.trajectory(epoch=0)
    assert (t.failure, t.retried, t.token_ids.tolist()) == (FailureClass.NONE, failure, [1, 2, 3, 12])
    assert len(t.turns) == len(state.episode().turns) == 1 and state.quanta == 3


def test_the_last_failure_ends_it():
    state = fresh(resample=2)
    for failure in (FailureClass.ENGINE, FailureClass.TOOL, FailureClass.TIMEOUT):
        assert state.phase is Phase.ROLLOUT
        state.apply(failed(failure))
    t = state.trajectory(epoch=0)
    assert (state.phase, t.failure, t.retried, t.attempt) == (None, FailureClass.TIMEOUT, "engine,tool", 2)
    assert len(t.token_ids) == len(t.kv_version) == 0 and t.turns == [] and t.oldest_version == -1
    assert np.isnan(t.reward)


def stepped(turn, ids, state):
    returns = (ToolReturn("step", ToolStatus.OK, "higher", 0.25, 6),)
    return ActionRecord(turn=turn, returns=returns, observation_ids=np.array(ids, np.int32), state=state)


def begun(state, first):
    return generation_record(0, np.array(first, np.int32), output([10]), "5", (), state)


def test_a_turn_without_a_call_waits_for_the_environment_which_may_end_it():
    state = fresh(steps=True)
    state.apply(begun(b"0", [1]))
    assert (state.phase, state.attempt.answered, state.attempt.state) == (Phase.TOOL, True, b"0")
    state.apply(stepped(0, [20], b"1"))
    assert (state.phase, state.attempt.state, state.attempt.context_ids.tolist()) == (Phase.ROLLOUT, b"1", [1, 10, 20])
    state.apply(generated(1, [11]))
    state.apply(end_record(1, b"2"))
    assert (state.phase, state.end, state.failure, state.attempt.state) == (
        None, EndReason.ANSWERED, FailureClass.NONE, b"2",
    )  # fmt: skip
    episode = state.episode(lambda data: f"decoded {data!r}")
    assert episode.state == "decoded b'2'"
    assert [turn.returns[0].content if turn.returns else None for turn in episode.turns] == ["higher", None]
    rows = state.trajectory(0).turns
    assert [(row["tool"], row["status"]) for row in rows] == [("step", "ok"), ("", "")]


def test_the_last_turn_is_answered_before_the_limit_of_turns_ends_it():
    won, lost = fresh(steps=True, max_turns=1), fresh(steps=True, max_turns=1)
    for state in (won, lost):
        state.apply(begun(b"0", [1]))
        assert state.phase is Phase.TOOL
    won.apply(end_record(0, b"1"))
    lost.apply(stepped(0, [20], b"1"))
    assert (won.end, lost.end, lost.failure) == (EndReason.ANSWERED, EndReason.MAX_TURNS, FailureClass.POLICY)


def test_a_fresh_draw_begins_without_the_state_of_the_failed_one_and_a_repeated_turn_keeps_it():
    for failure, kept in ((FailureClass.ENVIRONMENT, None), (FailureClass.ENGINE, b"1")):
        state = fresh(steps=True, resample=1)
        for record in (begun(b"0", [1]), stepped(0, [20], b"1"), failure_record(failure, "x")):
            state.apply(record)
        assert (state.attempt.state, state.phase, state.attempt.answered) == (kept, Phase.ROLLOUT, False)
