"""Actions that are stopped: while they run, before they begin, after their end, and not by what ends the task itself."""

import asyncio

import pytest

from libra.errors import ActionRevoked
from libra.worker.trajectory.turn_calls import KEPT, StoppableActions


async def test_a_revoked_action_is_cut_off_and_only_that_one():
    actions, begun, go, ended = StoppableActions(), asyncio.Event(), asyncio.Event(), list[str]()

    async def act(name):
        begun.set()
        try:
            await go.wait()
        finally:
            ended.append(name)

    stopped = asyncio.ensure_future(actions.run("x", 3, act("x")))
    other = asyncio.ensure_future(actions.run("y", 3, act("y")))
    await begun.wait()
    actions.revoke("x", 2)  # an action that had ended
    await asyncio.sleep(0)
    assert not ended
    actions.revoke("x", 3)
    with pytest.raises(ActionRevoked):
        await stopped
    assert ended == ["x"]
    go.set()
    await other
    await actions.run("x", 3, act("x"))  # the same quantum again
    assert ended == ["x", "y", "x"]


async def test_one_that_is_revoked_before_it_begins_does_not_begin():
    actions, called = StoppableActions(), list[int]()

    async def act():
        called.append(1)

    actions.revoke("x", 0)
    with pytest.raises(ActionRevoked):
        await actions.run("x", 0, act())
    assert not called
    actions.revoke("x", 0)
    await actions.run("x", 1, act())  # a later one
    for i in range(2 * KEPT):
        actions.revoke(f"gone {i}", 0)
    assert called == [1] and len(actions._revoked) == KEPT


async def test_a_task_that_is_cancelled_is_no_revocation():
    actions, begun = StoppableActions(), asyncio.Event()

    async def act():
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(actions.run("x", 0, act()))
    await begun.wait()
    actions.revoke("x", 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
