"""Actions of trajectories that are stopped for others: once, then to their end; a replay of the log repeats it."""

from __future__ import annotations

import pytest

from libra.policy import Dispatcher, Place, Priority, QuantumFinished, SetPriority, TrajectoryParked, WorkerJoined
from libra.policy.leases import Revoke
from libra.policy.messages import ActionRequested, ToolCapacity, ToolNeeds, ToolsDeclared
from libra.types import Phase, ToolStatus

TOOLS = {
    "long": ToolNeeds(1, 1, revocable=True),
    "kept": ToolNeeds(1, 1),
    "short": ToolNeeds(1, 1),
}


def park(dispatcher: Dispatcher, key: str, *tools: str, level: int = 0) -> None:
    dispatcher.handle(ActionRequested(key, tools))
    dispatcher.handle(TrajectoryParked(key, 0, Phase.TOOL, 0, "", "", 0))
    dispatcher.apply([SetPriority(key, Priority(0, level, 0), "test")])


def at(dispatcher: Dispatcher, at_s: float) -> tuple[list[str], tuple[Revoke, ...]]:
    """Who begins, and who is stopped."""
    places: tuple[Place, ...] = dispatcher.dispatch(Phase.TOOL, at_s)
    return [place.key for place in places], dispatcher.revocations()


def ended(dispatcher: Dispatcher, key: str, tool: str, took_s: float) -> None:
    dispatcher.handle(QuantumFinished(key, Phase.TOOL, 0, tool, ToolStatus.OK, took_s, 0))


@pytest.fixture
def dispatcher() -> Dispatcher:
    """A tool worker with one core, after an action of each tool."""
    made = Dispatcher()
    made.handle(WorkerJoined("a", tool_slots=4))
    made.handle(ToolsDeclared(TOOLS, {}))
    made.handle(ToolCapacity("a", 1, 0, 0))
    for tool, took_s in (("long", 60.0), ("kept", 60.0), ("short", 1.0)):
        park(made, tool, tool)
        assert at(made, 0.0)[0] == [tool]
        ended(made, tool, tool, took_s)
    return made


def test_an_action_is_stopped_once_and_is_then_run_to_its_end(dispatcher: Dispatcher) -> None:
    park(dispatcher, "x", "long")
    assert at(dispatcher, 10.0) == (["x"], ())
    park(dispatcher, "y", "short", level=3)
    begun, (revoke,) = at(dispatcher, 12.0)
    assert (begun, revoke.holder, revoke.worker, revoke.waiting, revoke.ran_s) == ([], "x", "a", "y", 2.0)
    assert at(dispatcher, 12.1) == ([], ())
    dispatcher.stopped("x")  # it was handed back
    park(dispatcher, "x", "long")
    dispatcher.apply([SetPriority("y", Priority(0, 4, 0), "later than before")])
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
def test_only_a_single_call_of_a_revocable_tool_is_stopped(dispatcher: Dispatcher, tools: tuple[str, ...]) -> None:
    dispatcher.handle(ToolCapacity("a", sum(name in TOOLS for name in tools), 0, 0))
    park(dispatcher, "x", *tools)
    assert at(dispatcher, 10.0) == (["x"], ())
    park(dispatcher, "y", "short")
    assert at(dispatcher, 11.0) == ([], ())
