"""Moves a trajectory's KV cache from worker to worker when its KV owner changes.

The scheduler announces the change, with the address of the old owner, before it sends the task. The
new owner requests the KV, gives it to its engine, and generates::

    new owner -> trajectory, version
    old owner -> header and bytes of the object, or the reason for their absence
    new owner -> kept: the old owner frees its copy

Channels are authenticated by the run's secret; on the same machine, memory is read in place.

Invariants
----------
1. After any fault (the old owner is gone, silent or has other weights; bytes are missing or
   changed) the new owner prefills the context again, and the report gives the reason. A trajectory
   waits at most `GIVE_UP_S` for its KV, and not at all for an owner that was silent in the last
   `SILENT_S`.
2. The old owner frees its KV only after the new owner has it.
3. An engine that is put to sleep leaves its KV in host memory until it wakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np

from libra.errors import KVRefused, LibraError, TransportError
from libra.facts import HomeChanged
from libra.rollout.engine import MovesKV
from libra.rollout.kv_objects import KVObject
from libra.transport import Address, Channel, Server, connect
from libra.transport.rows import machine, recv_views, send_views
from libra.types import TurnOutput, TurnRequest
from libra.worker.context import WorkerContext
from libra.worker.engine.verified_engine import Serving

logger = logging.getLogger(__name__)

PURPOSE = "kv"
GIVE_UP_S = 10.0
"""Seconds after which a transfer is abandoned; its bytes no longer count when they arrive."""
SILENT_S = 30.0
"""Seconds without requests to a KV owner that did not answer; its connections have ended by then."""
ASKED_AT_ONCE, ASKED_OF_ONE = 8, 2
"""Most concurrent requests to all KV owners, and to one: a stopped owner blocks only its share."""
KEPT_NOTICES = 4096
"""Most announced owner changes without their task; older announcements were cancelled."""


def give(channel: Channel, request: dict[str, Any], kv: KVObject) -> bool:
    """Answer a request with a KV object; returns whether the new owner kept it."""
    send_views(channel, [kv.data.data], request, kv=kv.header())
    return bool((channel.recv_frame() or {}).get("kept"))


def ask(
    address: Address, secret: str, trajectory_id: str, version: int, limit_bytes: int, *, neighbours: bool = True
) -> KVObject:
    """The KV of a trajectory at weights ``version``, from the worker at ``address``.

    Raises KVRefused if the worker has no such KV or more than ``limit_bytes``, or if the bytes
    changed; TransportError or OSError without an answer.
    """
    with contextlib.closing(connect(address, secret, purpose=PURPOSE, silence_s=GIVE_UP_S)) as channel:
        channel.send_frame(
            trajectory_id=trajectory_id, version=version, machine=(machine() or None) if neighbours else None
        )
        answer = channel.recv_frame() or {"error": "the old home closed the connection"}
        if "error" in answer:
            raise KVRefused(str(answer["error"]))
        num_bytes = int(answer["num_bytes"])
        if not 0 <= num_bytes <= limit_bytes:
            raise KVRefused(f"KV of {trajectory_id}: {num_bytes} bytes are more than the pool of {limit_bytes}")
        data = np.empty(num_bytes, np.uint8)
        recv_views(channel, answer, [data.data])
        kv = KVObject.received(answer["kv"], data)
        if (kv.trajectory_id, kv.version) != (trajectory_id, version):
            raise KVRefused(f"KV of {kv.trajectory_id}, version {kv.version} came for {trajectory_id}, {version}")
        channel.send_frame(kept=True)
        return kv


@dataclass(slots=True)
class _Brought:
    took_s: float = 0.0
    num_bytes: int = 0
    num_tokens: int = 0
    refused: str = ""


@dataclass(slots=True)
class _Home:
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ASKED_OF_ONE))
    silent_until_s: float = 0.0


class KVTransfers:
    """Sends and receives the KV of a worker's engine; ``limit_bytes`` is the KV pool's size."""

    def __init__(self, context: WorkerContext, serving: Serving, limit_bytes: int) -> None:
        self._context, self._serving, self._limit_bytes = context, serving, limit_bytes
        self._loop = asyncio.get_running_loop()
        self._announced: OrderedDict[str, tuple[Address | None, Mapping[str, Any]]] = OrderedDict()
        self._homes: dict[Address, _Home] = {}
        self._threads = ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="libra-kv")
        host = urlsplit(context.address).hostname or "127.0.0.1"
        self._server = Server(self._serve, secret=context.spec.secret, purpose=PURPOSE, host=host)
        self.address = self._server.address

    def close(self) -> None:
        self._server.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def announced(self, key: str, home: Sequence[Any] | None, move: Mapping[str, Any], **extra: Any) -> None:
        """Note that task ``key`` changes its KV owner from ``home`` (None if no worker has its KV).

        ``move`` has the fields of `libra.facts.HomeChanged` from home to sent.
        """
        self._announced[key] = None if home is None else (str(home[0]), int(home[1])), move
        while len(self._announced) > KEPT_NOTICES:
            self._announced.popitem(last=False)

    async def generate(self, key: str, request: TurnRequest) -> TurnOutput:
        """Generate one turn, with the announced KV if it arrives."""
        if key not in self._announced:
            return await self._serving.generate(request)
        home, move = self._announced.pop(key)
        brought = _Brought() if home is None else await self._bring(request.trajectory_id, home)
        output = await self._serving.generate(request)
        if output.cached_tokens < brought.num_tokens:
            brought = _Brought(refused="the engine did not use it: its weights have changed, or its pool was full")
        took_s = round(brought.took_s if brought.num_bytes else output.prefill_s, 6)
        changed = HomeChanged(key=key, took_s=took_s, num_bytes=brought.num_bytes, refused=brought.refused, **move)
        self._context.report(changed)
        return output

    async def _bring(self, trajectory_id: str, home: Address) -> _Brought:
        started_s, engine = time.perf_counter(), cast("MovesKV", self._serving.engine)
        try:
            kv = await asyncio.wait_for(self._asked(trajectory_id, home), GIVE_UP_S)
            if not await engine.import_kv(kv):
                raise KVRefused(f"KV of {trajectory_id}: no room for its {kv.num_bytes} bytes")
        except (LibraError, OSError, ValueError, LookupError, TypeError) as error:  # and answers that are malformed
            refused = str(error) or f"no answer within {GIVE_UP_S:g} s"
            logger.info("%s computes its context again: %s", trajectory_id, refused)
            return _Brought(refused=refused)
        return _Brought(time.perf_counter() - started_s, kv.num_bytes, kv.num_tokens)

    async def _asked(self, trajectory_id: str, home: Address) -> KVObject:
        known, version = self._homes.setdefault(home, _Home()), self._serving.engine.version
        async with known.turns:
            if time.monotonic() < known.silent_until_s:
                raise KVRefused(
                    f"KV of {trajectory_id}: {home[0]}:{home[1]} did not answer within the last {SILENT_S:g} s"
                )
            secret = self._context.spec.secret
            asked = self._threads.submit(ask, home, secret, trajectory_id, version, self._limit_bytes)
            try:
                return await asyncio.wrap_future(asked)
            except (TransportError, OSError, asyncio.CancelledError):
                if not asked.cancel():  # it had begun
                    known.silent_until_s = time.monotonic() + SILENT_S
                raise

    def _serve(self, channel: Channel, client: str) -> None:
        if (request := channel.recv_frame()) is None:
            return
        trajectory_id, version = str(request["trajectory_id"]), int(request["version"])
        try:
            found = asyncio.run_coroutine_threadsafe(self._export(trajectory_id, version), self._loop)
            kv = found.result(GIVE_UP_S)
        except (LibraError, TimeoutError, RuntimeError) as error:  # the last: the loop is closed
            channel.send_frame(error=str(error) or "the engine did not answer")
            return
        if give(channel, request, kv):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._serving.forget, trajectory_id)

    async def _export(self, trajectory_id: str, version: int) -> KVObject:
        serving = self._serving
        if serving.out is not None:
            raise KVRefused(f"the engine of {self._context.name} has no KV: it is out of service")
        kv = await cast("MovesKV", serving.engine).export_kv(trajectory_id)
        if kv is None or kv.version != version:
            has = "no KV" if kv is None else f"KV of version {kv.version}, not {version},"
            raise KVRefused(f"{self._context.name} has {has} of {trajectory_id}")
        return kv
