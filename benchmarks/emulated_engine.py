"""EmulatedEngine: an emulation of an inference engine, without weights, that takes the seconds of a real one.

Seconds come from `libra.hardware`, the batch from `VirtualEngine`, which the simulator uses too, and the tokens of a turn from a
trace. The clock is scaled wall time, or a virtual one that a test advances. Tokens are fillers, their log-probabilities 0.

Invariants
1. Those of `libra.rollout.engine`, but that the content of tokens means nothing.
2. A turn ends when the virtual engine's request does, never earlier by the given clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from libra.errors import EngineError
from libra.hardware import Residuals
from libra.hardware.engine_tables import EngineTables, Request
from libra.hardware.virtual_engine import VirtualEngine
from libra.rollout.engine import EngineStats
from libra.types import EngineCapacity, StopReason, TurnOutput, TurnRequest

FILLER = 0
"""Token id of every emulated token but the last."""


class Timer(Protocol):
    """A scheduled call that can be cancelled."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Emulated seconds."""

    def now_s(self) -> float:
        """Emulated seconds since the clock was made."""

    def call_at(self, at_s: float, callback: Callable[[], None]) -> Timer:
        """Call back when it is ``at_s``, on the running event loop."""


class ScaledClock:
    """Wall time, ``speedup`` emulated seconds for each."""

    def __init__(self, speedup: float = 1.0) -> None:
        if not speedup > 0.0:
            raise EngineError(f"speedup: got {speedup}; emulated seconds per second of wall time are above 0, e.g. 20")
        self.speedup = speedup
        self._begun_s = time.monotonic()

    def now_s(self) -> float:
        """Emulated seconds since the clock was made."""
        return (time.monotonic() - self._begun_s) * self.speedup

    def call_at(self, at_s: float, callback: Callable[[], None]) -> Timer:
        """Call back when it is ``at_s``."""
        delay_s = max(0.0, (at_s - self.now_s()) / self.speedup)
        return asyncio.get_running_loop().call_later(delay_s, callback)


class EmulatedEngine:
    """An engine whose turns take emulated seconds.

    Parameters
    ----------
    tables : EngineTables
        Seconds of one model on an engine of ``tables.seconds.tp`` GPUs.
    slots : int
        Requests at once.
    tokens_of : callable
        Tokens that a request generates, at most its ``max_new_tokens``.
    clock : Clock, optional
        None: wall time as it is.
    group_of : callable, optional
        Requests of one group share the KV of their prompt. None: none does.
    load_s : float
        Emulated seconds of a change of weights.
    typical_context_tokens : int
        Context of most turns, at which it declares its speed.
    residuals : Residuals, optional
        Draw seconds around the tables' with ``seed``, as measured ones lie around predictions. None: exact seconds.
    """

    def __init__(
        self,
        tables: EngineTables,
        *,
        slots: int,
        tokens_of: Callable[[TurnRequest], int],
        clock: Clock | None = None,
        group_of: Callable[[TurnRequest], tuple[str, int]] | None = None,
        load_s: float = 0.0,
        typical_context_tokens: int = 1,
        name: str = "emulated",
        residuals: Residuals | None = None,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        self.version = version
        self.clock = ScaledClock() if clock is None else clock
        self._virtual = VirtualEngine(name, tables, residuals=residuals, rng=np.random.default_rng(seed))
        self._tables, self._typical_context_tokens = tables, typical_context_tokens
        self._slots, self._tokens_of, self._load_s = slots, tokens_of, load_s
        self._group_of = group_of or (lambda request: (request.trajectory_id, 0))
        self._turns: dict[str, tuple[TurnRequest, asyncio.Future[TurnOutput], float]] = {}
        self._computed: dict[str, int] = {}
        self._timer: Timer | None = None
        self._paused: asyncio.Event | None = None
        self._closed = False

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(self, request: TurnRequest) -> TurnOutput:
        """One emulated turn; EngineError where it could never fit, or the engine is closed."""
        if self._paused is not None:
            await self._paused.wait()
        if self._closed:
            raise EngineError(f"{request.trajectory_id}: this emulated engine is closed")
        key, now_s = request.trajectory_id, self.clock.now_s()
        if key in self._turns:
            raise EngineError(f"{key}: it has a request in this engine already")
        group, prompt_tokens = self._group_of(request)
        virtual = Request(
            key,
            group,
            len(request.context_ids),
            prompt_tokens,
            max(1, min(request.max_new_tokens, self._tokens_of(request))),
            self._computed.get(key, 0),
        )
        future: asyncio.Future[TurnOutput] = asyncio.get_running_loop().create_future()
        self._turns[key] = (request, future, now_s)
        try:
            self._virtual.submit(now_s, virtual, request.priority)
        except ValueError as error:
            del self._turns[key]
            raise EngineError(f"{key}: {error}") from error
        self._arm()
        return await future

    def _arm(self) -> None:
        """Wake up when the next request ends, if nothing changes until then."""
        if self._timer is not None:
            self._timer.cancel()
        at_s = self._virtual.next_finish_s()
        self._timer = None if at_s is None else self.clock.call_at(at_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        for done in self._virtual.finished(self.clock.now_s()):
            self._finish(done.key, done.new_tokens, StopReason.STOP)
        self._arm()

    def _finish(self, key: str, new_tokens: int, reason: StopReason) -> None:
        request, future, began_s = self._turns.pop(key)
        self._computed[key] = len(request.context_ids) + new_tokens
        token_ids = np.full(new_tokens, FILLER, np.int32)
        if new_tokens and request.stop_ids and reason is StopReason.STOP:
            token_ids[-1] = request.stop_ids[0]
        versions = np.full(new_tokens, self.version, np.int32)
        busy_s = self.clock.now_s() - began_s
        if not future.done():
            zeros = np.zeros(new_tokens, np.float32)
            future.set_result(TurnOutput(token_ids, zeros, versions, versions.copy(), reason, 0, 0.0, busy_s))

    async def abort(self, trajectory_id: str) -> None:
        """End the request without tokens, if there is one."""
        if self._virtual.cancel(self.clock.now_s(), trajectory_id):
            self._finish(trajectory_id, 0, StopReason.ABORT)
        self._arm()

    def forget(self, trajectory_id: str) -> None:
        """Free the KV kept for a trajectory."""
        self._virtual.forget(trajectory_id)
        self._computed.pop(trajectory_id, None)

    async def pause(self) -> None:
        """Accept nothing new; running turns continue to their end, because emulated time cannot stop."""
        self._paused = self._paused or asyncio.Event()

    async def resume(self) -> None:
        """Accept requests again."""
        if self._paused is not None:
            self._paused.set()
            self._paused = None

    async def load_version(self, version: int, directory: Path) -> None:
        """Take ``load_s`` emulated seconds, drop what is kept, compute running contexts again."""
        self.version = version
        self._virtual.load(self.clock.now_s(), self._load_s)
        self._arm()

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """EngineError: there are no weights."""
        raise EngineError("an emulated engine has no weights, and cannot score")

    async def project(self, seed: int) -> dict[str, tuple[float, ...]]:
        """EngineError: there are no weights."""
        raise EngineError("an emulated engine has no weights to project")

    def stats(self) -> EngineStats:
        """Counters as of now."""
        running, waiting, kept = self._virtual.load_now
        c = self._virtual.counters
        return EngineStats(
            running, waiting, kept, self._slots, self.version, c.generated_tokens, c.prefilled_tokens, c.cached_tokens,
            c.busy_s, 0,
        )  # fmt: skip

    def capacity(self) -> EngineCapacity:
        """By its tables: an emulation measures nothing; its seconds are exactly those that it takes."""
        return self._tables.capacity(self._slots, self._typical_context_tokens)

    async def close(self) -> None:
        """Fail what is pending."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for key in self._virtual.lost():
            _, future, _ = self._turns.pop(key)
            if not future.done():
                future.set_exception(EngineError(f"{key}: the emulated engine was closed"))


def lengths_from(totals: Mapping[tuple[str, int], int]) -> Callable[[TurnRequest], int]:
    """Tokens by (trajectory, turn); EngineError for a turn that is not among them."""

    def tokens_of(request: TurnRequest) -> int:
        try:
            return totals[request.trajectory_id, request.turn]
        except KeyError:
            raise EngineError(f"{request.trajectory_id}: the trace has no turn {request.turn}") from None

    return tokens_of
