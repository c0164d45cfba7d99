"""Actions of trajectories that are stopped for others: once, then to their end; a replay of the log repeats it."""

import pytest

from libra import facts
from libra.policy import Dispatcher
from libra.types import NO_TOOL, Phase, ToolStatus

TOOLS = {"long": facts.ToolNeeds(1, 1, revocable=True), "kept": facts.ToolNeeds(1, 1), "short": facts.ToolNeeds(1, 1)}


def park(dispatcher, key, *tools, level=0):
    dispatcher.handle(facts.ActionRequested(key, tools))
    dispatcher.handle(facts.TrajectoryParked(key, 0, Phase.TOOL, 0, "", "", 0))
    dispatcher.apply([facts.SetPriority(key, facts.Priority(0, level, 0), "test")])


def at(dispatcher, at_s):
    places = dispatcher.dispatch(Phase.TOOL, at_s)
    return [place.key for place in places], dispatcher.revocations()


def ended(dispatcher, key, tool, took_s, status=ToolStatus.OK):
    dispatcher.handle(facts.QuantumFinished(key, Phase.TOOL, 0, tool, status, took_s, 0))


@pytest.fixture
def dispatcher():
    made = Dispatcher()
    made.handle(facts.WorkerCapacity("a", tool_slots=4))
    made.handle(facts.ToolsDeclared(TOOLS, {}))
    made.handle(facts.ToolCapacity("a", 1, 0, 0))
    for tool, took_s in (("long", 60.0), ("kept", 60.0), ("short", 1.0)):
        park(made, tool, tool)
        assert at(made, 0.0)[0] == [tool]
        ended(made, tool, tool, took_s)
    return made


def test_an_action_is_stopped_once_and_is_then_run_to_its_end(dispatcher):
    park(dispatcher, "x", "long")
    assert at(dispatcher, 10.0) == (["x"], ())
    park(dispatcher, "y", "short", level=3)
    begun, (revoke,) = at(dispatcher, 12.0)
    assert (begun, revoke.holder, revoke.worker, revoke.ran_s) == ([], "x", "a", 2.0)
    assert revoke.reason.startswith("y needs 1 core, and would wait ")
    assert at(dispatcher, 12.1) == ([], ())
    dispatcher.stopped("x")  # it was handed back
    park(dispatcher, "x", "long")
    dispatcher.apply([facts.SetPriority("y", facts.Priority(0, 4, 0), "later than before")])
    assert at(dispatcher, 12.5) == (["y"], ())
    ended(dispatcher, "y", "short", 1.0)
    assert at(dispatcher, 13.5) == (["x"], ())
    park(dispatcher, "y", "short")
    assert at(dispatcher, 14.0) == ([], ())  # not a second time
    ended(dispatcher, "x", "long", 60.0)
    assert at(dispatcher, 80.0) == (["y"], ())
    ended(dispatcher, "y", "short", 1.0)
    park(dispatcher, "x", "long")  # another action, which may be stopped again
    assert at(dispatcher, 81.0) == (["x"], ())
    park(dispatcher, "y", "short")
    assert [each.holder for each in at(dispatcher, 82.0)[1]] == ["x"]


@pytest.mark.parametrize("tools", [("kept",), ("long", "kept"), ("long", "long"), ("long", "plain")])
def test_only_a_single_call_of_a_revocable_tool_is_stopped(dispatcher, tools):
    dispatcher.handle(facts.ToolCapacity("a", sum(name in TOOLS for name in tools), 0, 0))
    park(dispatcher, "x", *tools)
    assert at(dispatcher, 10.0) == (["x"], ())
    park(dispatcher, "y", "short")
    assert at(dispatcher, 11.0) == ([], ())


@pytest.mark.parametrize("status", [ToolStatus.TIMEOUT, ToolStatus.ERROR, ToolStatus.TRUNCATED, NO_TOOL])
def test_a_tool_that_is_cut_off_or_fails_is_expected_to_take_as_long_again(dispatcher, status):
    """A short tool that hangs as often as not is no reason to stop a long one."""
    table, start_s = dispatcher.leases.table, 100.0
    for number in range(40):
        key = f"s{number}"
        park(dispatcher, key, "short")
        assert at(dispatcher, start_s)[0] == [key]
        took_s, how = (120.0, status) if number % 2 else (1.0, ToolStatus.OK)
        start_s += took_s
        ended(dispatcher, key, "short", took_s, how)
    assert table.expected_s("short") == pytest.approx(60.0, rel=0.15)
    park(dispatcher, "x", "long")
    assert at(dispatcher, start_s) == (["x"], ())
    park(dispatcher, "y", "short", level=3)
    assert at(dispatcher, start_s + 2.0) == ([], ())


def test_a_malformed_call_says_nothing_of_its_tool(dispatcher):
    park(dispatcher, "m", "long")
    assert at(dispatcher, 1.0)[0] == ["m"]
    ended(dispatcher, "m", "long", 0.001, ToolStatus.MALFORMED)
    assert dispatcher.leases.table.expected_s("long") == 60.0 and dispatcher.leases.table.lease("m") is None
