"""Leases of tool sessions: an action runs on the worker that has its trajectory's session.

An action's record has the lease (address of the worker, and name), so every worker knows it. The
worker that runs the next action sends the call to that address, and writes the record itself.

Invariants
----------
1. A lease without a record is released when its first turn fails; a recorded lease when its
   trajectory ends or starts again.
2. If the lease's worker is gone, was restarted or belongs to another start of the run, the action
   fails with SessionLost. This is an infrastructure failure: a fresh draw starts with another
   session.
3. An action that is repeated, because its worker died before the record, has the same return.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from libra.envs import StateCopy, run_action
from libra.envs.retries import TOTAL_S
from libra.envs.sessions import SessionCounts, SessionPool
from libra.errors import EnvironmentFault, SessionLost, ToolFault, ToolTimeout
from libra.facts import SessionsUsed
from libra.store.observations import keep_observation
from libra.types import Prompt, ToolCall, ToolReturn
from libra.worker.context import WorkerContext
from libra.worker.dask_worker import PEER_ERRORS, ask_worker, serve_worker, stop_serving

logger = logging.getLogger(__name__)

MARGIN_S = 30.0
"""Seconds beyond its time limits that an action on another worker may take."""
_FAULTS: dict[str, type[EnvironmentFault]] = {
    kind.__name__: kind for kind in (EnvironmentFault, SessionLost, ToolFault, ToolTimeout)
}

Lease = tuple[str, str]
"""Address of the worker, and the name of the lease in its pool."""


class SessionCall(NamedTuple):
    """An action in a session; ``where``: trajectory, draw, turn and call."""

    lease: str
    prompt: Prompt
    call: ToolCall
    action_id: str
    state: bytes | None
    where: tuple[str, int, int, int]


class SessionAnswer(NamedTuple):
    """The return of an action, and the trajectory's state afterwards."""

    returned: ToolReturn
    state: bytes | None


class SessionLeases:
    """This worker's session pool, and access to other workers' pools."""

    def __init__(self, context: WorkerContext) -> None:
        kind = context.environment.session
        assert kind is not None, "only for environments with a session"
        self.context = context
        self.pool = SessionPool(kind, time.monotonic)
        self._op = f"libra-session-{context.spec.run}-{context.spec.epoch}"
        self._releases: set[asyncio.Task[None]] = set()
        self._reported = SessionCounts()
        serve_worker(context.worker, self._op, self._requested)

    async def close(self) -> None:
        stop_serving(self.context.worker, self._op)
        await asyncio.gather(*self._releases, return_exceptions=True)
        await self.pool.close()
        logger.info("sessions: %s", self._counts())

    async def acquire(self, trajectory_id: str) -> Lease:
        lease = self.context.address, await self.pool.lease(trajectory_id)
        self._report()
        logger.info("sessions: %s leases %s; %s", trajectory_id, lease[1], self._counts())
        return lease

    def release(self, lease: Lease) -> None:
        """End a lease, here or on another worker, without waiting for the reset."""
        task = asyncio.ensure_future(self._release(lease))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, lease: Lease) -> None:
        try:
            await self._ask(lease, MARGIN_S, lease=lease[1])
        except (TimeoutError, *PEER_ERRORS) as error:
            logger.info("sessions: %s was not released: its worker %s does not answer (%r)", lease[1], lease[0], error)

    async def run(
        self,
        lease: Lease,
        prompt: Prompt,
        call: ToolCall,
        action_id: str,
        state: StateCopy,
        where: tuple[str, int, int, int],
    ) -> ToolReturn:
        """The return of an action in the leased session.

        ``where``: trajectory, draw, turn and call. Raises SessionLost, and errors of
        `libra.envs.run_action`.
        """
        called = msgspec.msgpack.encode(SessionCall(lease[1], prompt, call, action_id, state.data, where))
        limit_s = self.context.environment.session_limit_s(call.name) + TOTAL_S + MARGIN_S
        try:
            answer = await self._ask(lease, limit_s, called=called)
        except (TimeoutError, *PEER_ERRORS) as error:
            if lease[0] == self.context.address:
                raise
            raise SessionLost(
                f"{action_id}: the worker {lease[0]} with its session does not answer ({error!r:.200})"
            ) from error
        if "fault" in answer:
            raise _FAULTS.get(answer["fault"], EnvironmentFault)(answer["text"])
        found = msgspec.msgpack.decode(answer["found"], type=SessionAnswer)
        state.data = found.state
        return found.returned

    async def _ask(self, lease: Lease, limit_s: float, /, **asked: Any) -> Mapping[str, Any]:
        if lease[0] == self.context.address:
            return await self._requested(asked)
        asking = ask_worker(self.context.worker, lease[0], self._op, asked=asked)
        answer: Mapping[str, Any] = await asyncio.wait_for(asking, limit_s)
        return answer

    async def _requested(self, asked: Mapping[str, Any], comm: Any = None) -> dict[str, Any]:
        if "lease" in asked:
            await self.pool.release(asked["lease"])
            self._report()
            logger.info("sessions: %s has ended; %s", asked["lease"], self._counts())
            return {}
        called = msgspec.msgpack.decode(asked["called"], type=SessionCall)
        copy = StateCopy(self.context.environment, called.state, called.action_id)
        try:
            lease = await self.pool.use(called.lease)
            async with lease.busy:
                turn = called.action_id.rsplit("/", 1)[0]
                if called.action_id not in lease.returns:
                    lease.returns = {name: each for name, each in lease.returns.items() if name.startswith(f"{turn}/")}
                    found = await run_action(
                        self.context.environment,
                        called.prompt,
                        called.call,
                        action_id=called.action_id,
                        state=copy,
                        session=lease.value,
                        keep=partial(keep_observation, self.context.spec.directory, *called.where),
                        back_off=self.context.spec.back_off,
                    )
                    answer = msgspec.msgpack.encode(SessionAnswer(found, copy.data))
                    lease.returns[called.action_id] = {"found": answer}
                return dict(lease.returns[called.action_id])
        except EnvironmentFault as error:
            self._report()
            return {"fault": type(error).__name__, "text": str(error)}

    def _report(self) -> None:
        now = replace(self.pool.counts)
        new = {name: count - getattr(self._reported, name) for name, count in asdict(now).items()}
        if any(new.values()):
            self._reported = now
            self.context.report(SessionsUsed(**new))

    def _counts(self) -> str:
        done = ", ".join(f"{number} {name}" for name, number in asdict(self.pool.counts).items())
        return f"{len(self.pool.leases)} leased, {len(self.pool.free)} free, {done}"
