"""The tool calls of one turn: beside one another, in sessions, or in processes with leased cores."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from libra import keys
from libra.envs import StateCopy, run_action
from libra.envs.action_process import ActionProcesses
from libra.errors import ActionRevoked
from libra.store.observations import keep_observation
from libra.types import Phase, ToolCall, ToolReturn, ToolStatus
from libra.untrusted import storable
from libra.worker.context import WorkerContext
from libra.worker.dask_worker import resources_here
from libra.worker.trajectory.session_leases import SessionLeases
from libra.worker.trajectory.trajectory_state import TrajectoryState


class TurnCalls:
    """One per quantum runner; calls with resources of their own run in ``processes``, if the worker has
    any."""

    def __init__(
        self, context: WorkerContext, sessions: SessionLeases | None, processes: ActionProcesses | None
    ) -> None:
        self._context, self._sessions, self._processes = context, sessions, processes
        self._names = frozenset(tool.name for tool in context.environment.tools)
        self._declaring = frozenset(tool.name for tool in context.environment.tools if tool.declares)
        self._revocable = frozenset(tool.name for tool in context.environment.tools if tool.revocable)

    def with_resources(self, state: TrajectoryState) -> tuple[str, ...]:
        """Tools that the next action calls, if one of them has resources."""
        if not self._declaring or state.rules.agent or state.phase is not Phase.TOOL:
            return ()
        names = tuple(call.name for call in state.calls if call.error is None and call.name in self._names)
        return () if self._declaring.isdisjoint(names) else names

    def revocable(self, state: TrajectoryState) -> bool:
        """Whether the next action may be stopped, and begun again: a single call of a revocable tool."""
        calls = self.with_resources(state) if self._revocable else ()
        return len(calls) == 1 and calls[0] in self._revocable

    def lacks_lease(self, key: str, state: TrajectoryState) -> bool:
        """Whether the action needs resources and its task came for a generation, as in a resumed run."""
        return bool(self.with_resources(state)) and keys.TOOL not in resources_here(self._context.worker, key)

    def cores_of(self, key: str) -> int | None:
        """The own cores of a task's action, if any."""
        if not self._declaring:
            return None
        return int(resources_here(self._context.worker, key).get(keys.TOOL_CORES, 0)) or None

    async def lease(self, state: TrajectoryState) -> tuple[str, str] | None:
        """The trajectory's lease of a session; a new one of this worker at its first call that takes one."""
        takes = {tool.name for tool in self._context.environment.tools if tool.takes_session}
        if state.lease is not None or self._sessions is None or not any(call.name in takes for call in state.calls):
            return state.lease
        return await self._sessions.acquire(str(state.tid))

    async def returns(
        self, state: TrajectoryState, turn: int, copy: StateCopy, lease: tuple[str, str] | None, cores: int | None
    ) -> list[ToolReturn]:
        """The returns of a turn's calls: all at once, or in order if one takes the trajectory's state or
        session."""
        # Evaluations at two versions are the same questions, seeds and injected faults.
        name = str(state.tid if state.tid.split == "train" else state.tid._replace(iteration=0))
        if state.draw:
            name += f".{state.draw}"
        environment = self._context.environment
        with_session = {tool.name for tool in environment.tools if tool.takes_session}

        def action(index: int, call: ToolCall) -> Coroutine[Any, Any, ToolReturn]:
            action_id = f"{name}/{turn}/{index}"
            if self._sessions is not None and lease is not None and call.error is None and call.name in with_session:
                where = str(state.tid), state.draw, turn, index
                return self._sessions.run(lease, state.prompt, call, action_id, copy, where)
            keep = partial(keep_observation, self._context.spec.directory, str(state.tid), state.draw, turn, index)
            return run_action(
                environment, state.prompt, call, action_id=action_id, state=copy, keep=keep,
                processes=self._processes, cores=cores if len(state.calls) == 1 else None,
                back_off=self._context.spec.back_off,
            )  # fmt: skip

        actions = itertools.starmap(action, enumerate(state.calls))
        stateful = {tool.name for tool in environment.tools if tool.takes_state} | with_session
        if any(call.name in stateful for call in state.calls):
            return [await action for action in actions]
        outcomes = await asyncio.gather(
            *actions,
            return_exceptions=True,  # all have ended before the trajectory continues, or ends
        )
        returns: list[ToolReturn] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            returns.append(outcome)
        return returns


MOST_RECORDED_CHARS = 8000
"""Characters in the record of a return that is kept by reference (`libra.store.observations`)."""


def recorded(given: ToolReturn, content: str) -> ToolReturn:
    """A tool's return for its record: the ``content`` that the model read, or of a large one a prefix and
    a reference."""
    if content != given.content:
        status = ToolStatus.TRUNCATED if given.status is ToolStatus.OK else given.status
        given = replace(given, content=storable(content), status=status)
    if not given.reference or len(given.content) <= MOST_RECORDED_CHARS:
        return given
    kept = given.content[:MOST_RECORDED_CHARS]
    note = f"[{len(given.content) - len(kept)} more characters in {given.reference}]"
    return replace(given, content=f"{kept}\n{note}")


KEPT = 1024
"""The newest revocations that are kept, of actions that have yet to begin here or had just ended."""


class StoppableActions:
    """One per quantum runner."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[int, asyncio.Future[None]]] = {}
        self._revoked: OrderedDict[str, int] = OrderedDict()

    def revoke(self, key: str, quantum: int, **_: Any) -> None:
        """Stop quantum ``quantum`` of a task, now or as soon as it begins; one that has ended stays as it is."""
        self._revoked[key] = quantum
        while len(self._revoked) > KEPT:
            self._revoked.popitem(last=False)
        at, action = self._running.get(key, (None, None))
        if action is not None and at == quantum:
            action.cancel()

    async def run(self, key: str, quantum: int, action: Coroutine[Any, Any, None]) -> None:
        """Await ``action``; ActionRevoked if it was stopped before its end."""
        task = asyncio.ensure_future(action)
        self._running[key] = quantum, task
        if self._revoked.get(key) == quantum:
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._revoked.get(key) != quantum or (current is not None and current.cancelling()):
                raise
            raise ActionRevoked(f"{key}: quantum {quantum} was stopped, and is called again") from None
        finally:
            del self._running[key]
            self._revoked.pop(key, None)
