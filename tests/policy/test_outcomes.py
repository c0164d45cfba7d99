"""One vocabulary of tool outcomes: what live tools say is what forecasters know, whichever words a trace had for it."""

import asyncio
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.orderings import Paper
from libra.envs import tool
from libra.envs.tool_calls import run_action
from libra.facts import QuantumFinished, TrajectoryParked
from libra.policy.posterior.regression import NO_COUNTS, OUTCOMES, counted
from libra.testing import FixedTurns
from libra.types import NO_TOOL, Phase, Prompt, ToolCall, ToolReturn, ToolStatus, tool_outcome

BEHAVIOURS = ("returns", "raises", "hangs", "floods", "no such tool", "no such argument", "unreadable")


@cache
def act(how: str) -> ToolReturn:
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
def test_every_outcome_that_an_environment_writes_has_a_feature_of_its_own(hows, payload):
    one, other = (act(how).status for how in hows)
    counts = [counted(NO_COUNTS, 3, status, payload) for status in (one, other)]
    assert (counts[0] == counts[1]) == (one is other)
    assert set(OUTCOMES) == set(ToolStatus) == {act(how).status for how in BEHAVIOURS}


def test_words_that_are_no_outcome_are_refused_where_they_are_read():
    assert {tool_outcome(word) for word in ("", *ToolStatus)} == {NO_TOOL, *ToolStatus}
    for word in ("success", "Ok", " ok"):
        for read in (tool_outcome, lambda w: ToolReturn("ls", w, ""), lambda w: counted(NO_COUNTS, 0, w, 10)):
            with pytest.raises(ValueError, match=f"'{word}'"):
                read(word)


def test_the_papers_rule_counts_what_came_back_by_its_outcome():
    rule = Paper()
    rule.handle(TrajectoryParked("t", 0, Phase.ROLLOUT, 0, "g"))
    rule.handle(QuantumFinished("t", Phase.TOOL, 0, "", ToolStatus.MALFORMED, 1.0))
    rule.handle(QuantumFinished("t", Phase.ROLLOUT, 5, "", NO_TOOL, 1.0))
    assert rule.snapshot()["paths"]["t"][1:] == [[":0:failure"], [0, 5]]
