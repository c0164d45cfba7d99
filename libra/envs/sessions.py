"""Sessions: live objects, such as a browser or a shell, that outlive actions and trajectories.

An environment declares one kind (``Environment.session``). Each worker with TOOL slots keeps a pool
of sessions, and a trajectory leases a session from the first action that needs it until the
trajectory ends. A session stays in its process, so `libra.worker.trajectory.session_leases` sends
the actions there. Values that travel with the records are states (`Environment.reset`).

Invariants
----------
1. One trajectory at a time leases a session, which is new or reset when the lease starts.
2. The user's code runs at most ``timeout_s``: a call that hangs is abandoned with its session.
3. A session that is dead, or whose reset failed, is closed and never leased again.
4. The function of an action runs once per lease: a repeated request gets the first return.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from libra.envs.tool import SessionKind
from libra.envs.tool_calls import called_or_fault
from libra.errors import EnvironmentFault, SessionLost, ToolTimeout

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Lease:
    """A session and its trajectory; ``returns`` has the last turn's returns by action name."""

    lease_id: str
    trajectory_id: str
    value: Any
    used_s: float
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    returns: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class SessionCounts:
    """Numbers of new sessions, leases of old sessions, resets, replacements and expired leases."""

    made: int = 0
    reused: int = 0
    resets: int = 0
    replaced: int = 0
    expired: int = 0


class SessionPool:
    """Sessions of one worker and one run, in one event loop. ``clock`` gives seconds."""

    def __init__(self, kind: SessionKind, clock: Callable[[], float]) -> None:
        self.kind, self.clock, self.counts = kind, clock, SessionCounts()
        self.leases: dict[str, Lease] = {}
        self.free: list[Any] = []
        self._pending = 0  # sessions being made or reset
        self._changed = asyncio.Condition()
        self._closing = False

    async def lease(self, trajectory_id: str) -> str:
        """Lease a session; returns the lease's name. EnvironmentFault if the factory raised or no
        session became free in time; ToolTimeout if the factory hangs."""
        value = await self._ready(trajectory_id)
        name = uuid.uuid4().hex  # a later pool at the same address must not know these leases
        self.leases[name] = Lease(name, trajectory_id, value, self.clock())
        return name

    async def use(self, lease_id: str) -> Lease:
        """The lease, for an action; SessionLost if the lease has ended or its session is dead."""
        lease = self.leases.get(lease_id)
        if lease is None:
            raise SessionLost("its session has ended: the worker that had it was restarted, or took it back")
        lease.used_s = self.clock()
        if not await self._is_alive(lease.value):
            self.leases.pop(lease_id, None)
            await self._replace(lease.value)
            await self._tell()
            raise SessionLost(f"the session of {lease.trajectory_id} has died")
        return lease

    async def release(self, lease_id: str) -> None:
        """End a lease if it exists, and reset or close its session."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return
        self._pending += 1
        try:
            await self._reset(lease.value)
        finally:
            self._pending -= 1
            await self._tell()

    async def close(self) -> None:
        """Close all sessions, leased ones included."""
        self._closing = True
        values = [*self.free, *(lease.value for lease in self.leases.values())]
        self.free.clear()
        self.leases.clear()
        await asyncio.gather(*map(self._close, values))

    @property
    def size(self) -> int:
        """Number of sessions, including sessions that are being made or reset."""
        return len(self.free) + len(self.leases) + self._pending

    async def _ready(self, trajectory_id: str) -> Any:
        until_s = self.clock() + self.kind.timeout_s
        while True:
            while self.free:
                value = self.free.pop()
                if await self._is_alive(value):
                    self.counts.reused += 1
                    return value
                await self._replace(value)
            if self.kind.most is None or self.size < self.kind.most:
                return await self._made()
            stalest = min(self.leases.values(), key=lambda lease: lease.used_s, default=None)
            if stalest is not None and self.clock() - stalest.used_s > self.kind.lease_s and not stalest.busy.locked():
                self.counts.expired += 1
                logger.warning(
                    "sessions: the lease of %s ends, idle for %g s", stalest.trajectory_id, self.kind.lease_s
                )
                await self.release(stalest.lease_id)
                continue
            left_s = until_s - self.clock()
            if left_s <= 0:
                raise EnvironmentFault(
                    f"session: all {self.kind.most} sessions of this worker were leased for {self.kind.timeout_s:g} s "
                    f"({trajectory_id}); raise most, or use fewer TOOL slots"
                )
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait(), left_s)
                except TimeoutError:
                    continue

    async def _made(self) -> Any:
        self._pending += 1
        try:
            return await self._called("factory", self.kind.factory)
        finally:
            self._pending -= 1
            self.counts.made += 1

    async def _reset(self, value: Any) -> None:
        if self.kind.reset is None or self._closing or len(self.free) >= self.kind.idle:
            await self._close(value)
        elif (await self._tried("reset", self.kind.reset, value))[0]:
            self.counts.resets += 1
            self.free.append(value)
        else:
            await self._replace(value)

    async def _is_alive(self, value: Any) -> bool:
        return all(await self._tried("alive", self.kind.alive, value))

    async def _replace(self, value: Any) -> None:
        self.counts.replaced += 1
        await self._close(value)

    async def _close(self, value: Any) -> None:
        await self._tried("close", self.kind.close, value)

    async def _tried(self, what: str, function: Callable[[Any], Any] | None, value: Any) -> tuple[bool, Any]:
        try:
            return True, True if function is None else await self._called(what, function, value)
        except (EnvironmentFault, ToolTimeout) as error:
            logger.warning("sessions: one has failed: %s", error)
            return False, None

    async def _called(self, what: str, function: Callable[..., Any], *given: Any) -> Any:
        return await called_or_fault(f"session: {what}", self.kind.timeout_s, function, *given, where="")

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
