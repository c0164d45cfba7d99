"""The tool calls of one turn: parsing, and execution at once, in sessions, or on leased cores."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from libra import keys
from libra.agents.messages import split_reasoning
from libra.envs import Environment, StateCopy, run_action
from libra.envs.action_process import ActionProcesses
from libra.envs.tool_call_formats import TOOL_FORMATS
from libra.errors import ActionRevoked
from libra.store.observations import keep_observation
from libra.types import Phase, StopReason, ToolCall, ToolReturn, ToolStatus, TurnOutput
from libra.untrusted import storable, storable_calls
from libra.worker.context import WorkerContext
from libra.worker.dask_worker import resources_here
from libra.worker.trajectory.session_leases import SessionLeases
from libra.worker.trajectory.trajectory_state import TrajectoryState


class TurnCalls:
    """Runs tool calls of turns; calls with their own resources run in ``processes``, if given."""

    def __init__(
        self, context: WorkerContext, sessions: SessionLeases | None, processes: ActionProcesses | None
    ) -> None:
        self._context, self._sessions, self._processes = context, sessions, processes
        tools = context.environment.tools
        self._names = frozenset(tool.name for tool in tools)
        self._declaring = frozenset(tool.name for tool in tools if tool.declares)
        self._revocable = frozenset(tool.name for tool in tools if tool.revocable)
        self._with_session = frozenset(tool.name for tool in tools if tool.takes_session)
        self._in_order = self._with_session | {tool.name for tool in tools if tool.takes_state}

    def with_resources(self, state: TrajectoryState) -> tuple[str, ...]:
        """Tools that the next action calls; empty unless a tool among them declares resources."""
        if not self._declaring or state.rules.agent or state.phase is not Phase.TOOL:
            return ()
        names = tuple(call.name for call in state.attempt.calls if call.error is None and call.name in self._names)
        return () if self._declaring.isdisjoint(names) else names

    def revocable(self, state: TrajectoryState) -> bool:
        """Whether the next action may be stopped and repeated: one call of a revocable tool."""
        calls = self.with_resources(state) if self._revocable else ()
        return len(calls) == 1 and calls[0] in self._revocable

    def lacks_lease(self, key: str, state: TrajectoryState) -> bool:
        """Whether the next action needs resources that its task did not lease (a resumed run)."""
        return bool(self.with_resources(state)) and keys.TOOL not in resources_here(self._context.worker, key)

    def cores_of(self, key: str) -> int | None:
        """Number of cores that a task leases for its action, or None."""
        if not self._declaring:
            return None
        return int(resources_here(self._context.worker, key).get(keys.TOOL_CORES, 0)) or None

    async def returns(
        self, state: TrajectoryState, copy: StateCopy, cores: int | None
    ) -> tuple[list[ToolReturn], tuple[str, str] | None]:
        """The returns of a turn's calls, and the trajectory's session lease.

        Calls run concurrently, or in order if one uses the trajectory's state or session. The first
        call that needs a session leases one of this worker; if a call fails, that lease is
        released.
        """
        now, lease = state.attempt, state.attempt.lease
        if lease is None and self._sessions is not None and any(call.name in self._with_session for call in now.calls):
            lease = await self._sessions.acquire(str(state.tid))
        try:
            actions = [self._action(state, index, call, copy, lease, cores) for index, call in enumerate(now.calls)]
            if any(call.name in self._in_order for call in now.calls):
                return [await action for action in actions], lease
            # Every call has ended before the trajectory continues or ends.
            outcomes = await asyncio.gather(*actions, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            return cast("list[ToolReturn]", outcomes), lease
        except BaseException:
            if self._sessions is not None and lease is not None and lease != now.lease:
                self._sessions.release(lease)  # no record has it
            raise

    def _action(
        self,
        state: TrajectoryState,
        index: int,
        call: ToolCall,
        copy: StateCopy,
        lease: tuple[str, str] | None,
        cores: int | None,
    ) -> Coroutine[Any, Any, ToolReturn]:
        now, spec = state.attempt, self._context.spec
        # Evaluations at two versions are the same questions, seeds and injected faults.
        name = str(state.tid if state.tid.split == "train" else state.tid._replace(iteration=0))
        action_id = f"{name}{f'.{now.number}' if now.number else ''}/{now.turns - 1}/{index}"
        where = str(state.tid), now.number, now.turns - 1, index
        if self._sessions is not None and lease is not None and call.error is None and call.name in self._with_session:
            return self._sessions.run(lease, state.prompt, call, action_id, copy, where)
        return run_action(
            self._context.environment, state.prompt, call, action_id=action_id, state=copy,
            keep=partial(keep_observation, spec.directory, *where), processes=self._processes,
            cores=cores if len(now.calls) == 1 else None, back_off=spec.back_off,
        )  # fmt: skip


def agent_calls(environment: Environment, text: str) -> tuple[ToolCall, ...]:
    """The calls in the model's text after its reasoning, in ``rollout.tool_format``."""
    rest = split_reasoning(text)[1]
    return storable_calls(TOOL_FORMATS[environment.tool_format].parse(rest, environment.tools))


def cut_at_stop(
    output: TurnOutput, before: Sequence[Any], stops: Sequence[str], decode: Callable[[Any], str]
) -> tuple[TurnOutput, str | None]:
    """A generation up to the token that completes the first stop text, and that text or None.

    Later tokens are dropped, as if the engine had stopped there. ``before``: token ids of earlier
    parts of the turn.
    """
    ids = output.token_ids

    def found(count: int) -> str | None:
        text = decode(np.concatenate([*before, ids[:count]]))
        return min(((text.index(stop), stop) for stop in stops if stop in text), default=(0, None))[1]

    if not stops or found(len(ids)) is None:
        return output, None
    # The text only grows with the number of tokens, so bisection finds the end.
    end = 1 + bisect_left(range(1, len(ids)), True, key=lambda count: found(count) is not None)
    columns = {
        name: getattr(output, name)[:end] for name in ("token_ids", "logprobs", "weight_versions", "kv_versions")
    }
    return replace(output, **columns, stop_reason=StopReason.STOP), found(end)


MOST_RECORDED_CHARS = 8000
"""Characters in the record of a return that is kept by reference (`libra.store.observations`)."""


def recorded(given: ToolReturn, content: str) -> ToolReturn:
    """A tool's return for the journal: the text that the model read, or a prefix and reference."""
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
    """Running actions that the scheduler may revoke."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[int, asyncio.Future[None]]] = {}
        self._revoked: OrderedDict[str, int] = OrderedDict()

    def revoke(self, key: str, quantum: int, **_: Any) -> None:
        """Stop a task's quantum ``quantum`` now or when it starts; no effect if it has ended."""
        self._revoked[key] = quantum
        while len(self._revoked) > KEPT:
            self._revoked.popitem(last=False)
        at, action = self._running.get(key, (None, None))
        if action is not None and at == quantum:
            action.cancel()

    async def run(self, key: str, quantum: int, action: Coroutine[Any, Any, None]) -> None:
        """Await ``action``. Raises ActionRevoked if it was revoked."""
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
