"""One vocabulary of tool outcomes: what live tools say is what forecasters know, whichever words a trace had for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.envs import tool
from libra.envs.actions import run_action
from libra.policy import QuantumFinished, TrajectoryEnded, TrajectoryParked, make_ordering
from libra.policy.posterior import Posterior
from libra.policy.posterior.forecast_columns import ADDS, OUTCOMES, state_of, tool_of
from libra.testing import FixedTurns
from libra.traces.agent_turns import AGENT_TURNS, agent_turns
from libra.types import (
    NO_TOOL,
    Phase,
    Prompt,
    ToolCall,
    ToolOutcome,
    ToolReturn,
    ToolStatus,
    tool_outcome,
    turn_outcome,
)

Turns = list[tuple[int, ToolStatus]]


def failing_mix(count: int, *, seed: int = 0) -> list[Turns]:
    """Every second trajectory is four times as long as the others, and its tool nearly always fails; nothing else tells."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        long = number % 2 == 1
        failed = rng.random(int(rng.integers(5, 12)) * (4 if long else 1)) < (0.9 if long else 0.02)
        made.append([(int(rng.integers(50, 150)), ToolStatus.ERROR if bad else ToolStatus.OK) for bad in failed])
    return made


def skill_of(mix: Sequence[Sequence[tuple[int, ToolOutcome]]]) -> float:
    """Skill of the posterior once it has heard of these, each after the one before."""
    posterior = Posterior()
    for number, turns in enumerate(mix):
        key = f"t-{number}"
        posterior.handle(TrajectoryParked(key, 0, Phase.ROLLOUT, 0))
        for tokens, status in turns:
            posterior.handle(QuantumFinished(key, Phase.ROLLOUT, tokens, "", NO_TOOL, 1.0))
            if status:
                posterior.handle(QuantumFinished(key, Phase.TOOL, 0, "shell", status, 1.0, 10))
        posterior.handle(TrajectoryEnded(key))
        posterior.learn()
    return posterior.skill


def test_failures_that_tell_the_length_give_the_skill_that_the_same_failures_in_a_traces_words_give() -> None:
    mix = failing_mix(120)
    rows = ["task,sample,turn,tool,status,completion_tokens"]
    for number, turns in enumerate(mix):
        rows += [
            f"t,{number},{i},shell,{'success' if status is ToolStatus.OK else 'failure'},{tokens}"
            for i, (tokens, status) in enumerate(turns)
        ]
    recorded = agent_turns(rows, ("status",), "made here")
    live = skill_of(mix)
    assert skill_of([[(turn.completion_tokens, turn.status) for turn in one.turns] for one in recorded]) == live
    unknown = skill_of([[(tokens, ToolStatus.OK) for tokens, _ in turns] for turns in mix])
    assert live > 0.4
    assert unknown < live - 0.2  # so much of it is what the outcomes say


BEHAVIOURS = ("returns", "raises", "hangs", "floods", "no such tool", "no such argument", "unreadable")


@cache
def act(how: str) -> ToolReturn:
    """What an environment of Libra says of a tool that behaves like this."""

    async def work(how: str) -> str:
        """Do something.

        Args:
            how: What.
        """
        if how == "raises":
            raise RuntimeError("broken")
        if how == "hangs":
            await asyncio.Event().wait()
        return "z" * (1000 if how == "floods" else 1)

    environment = FixedTurns()
    environment.tools = (tool(work, timeout_s=0.001, max_payload_chars=20),)
    call = ToolCall("none" if how == "no such tool" else "work", {"which" if how == "no such argument" else "how": how})
    if how == "unreadable":
        call = ToolCall("", {}, "not valid JSON")
    return asyncio.run(run_action(environment, Prompt("p", ()), call, action_id="train-0-0-0/0/0"))


@given(hows=st.lists(st.sampled_from(BEHAVIOURS), min_size=2, max_size=2, unique=True), payload=st.integers(0, 3000))
def test_every_outcome_that_an_environment_writes_has_a_feature_of_its_own(hows: list[str], payload: int) -> None:
    one, other = (act(how).status for how in hows)
    states = [state_of(3, status, payload) for status in (one, other)]
    assert (states[0] == states[1]) == (one is other) == bool((ADDS[states[0]] == ADDS[states[1]]).all())
    assert [tool_of(state) for state in states] == [3, 3]
    assert set(OUTCOMES) == set(ToolStatus) == {act(how).status for how in BEHAVIOURS}


def test_words_that_are_no_outcome_are_refused_where_they_are_read() -> None:
    assert {tool_outcome(word) for word in ("", *ToolStatus)} == {NO_TOOL, *ToolStatus}
    for word in ("success", "Ok", " ok"):
        for read in (tool_outcome, lambda word: ToolReturn("ls", word, ""), lambda word: state_of(0, word, 10)):
            with pytest.raises(ValueError, match=f"'{word}'"):
                read(word)


def test_a_turn_of_several_calls_is_as_its_first_that_went_wrong() -> None:
    ok, late, bad = ToolStatus.OK, ToolStatus.TIMEOUT, ToolStatus.MALFORMED
    assert turn_outcome([ok, late, bad]) is late
    assert turn_outcome([ok, ok]) is ok
    assert turn_outcome([]) == NO_TOOL


def test_the_papers_rule_counts_what_came_back_by_its_outcome() -> None:
    rule = make_ordering(name="paper", objective="makespan", patience=1)
    rule.handle(TrajectoryParked("t", 0, Phase.ROLLOUT, 0, "g"))
    rule.handle(QuantumFinished("t", Phase.TOOL, 0, "", ToolStatus.MALFORMED, 1.0))
    rule.handle(QuantumFinished("t", Phase.ROLLOUT, 5, "", NO_TOOL, 1.0))
    assert rule.snapshot()["paths"]["t"][1:] == [[":0:failure"], [0, 5]]


def test_every_word_of_a_trace_format_means_an_outcome() -> None:
    assert set(AGENT_TURNS.values()) == {NO_TOOL, *ToolStatus}
    assert all(AGENT_TURNS[status] is status for status in ToolStatus)
