"""The engine of a worker: its kind, its weight versions, and its reports to the scheduler."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from libra.errors import EngineError, LibraError
from libra.facts import EngineDeclared, EngineJoined, EngineSlept, EngineWoke, Fact, VersionServed
from libra.policy import leaves_slot, off_by_frac
from libra.rollout.capacity import FEWEST_PASSES, GIB, KEPT_PASSES, architecture_of, read_model_config
from libra.types import EngineCapacity, TurnOutput, TurnRequest
from libra.worker.context import WorkerContext
from libra.worker.dask_worker import priority_here
from libra.worker.engine.engine_factory import EngineKind, make_engine, stats_of
from libra.worker.engine.kv_transfer import KVTransfers
from libra.worker.engine.verified_engine import Serving
from libra.worker.model_files import ONE_MODEL_AT_A_TIME

logger = logging.getLogger(__name__)

DECLARED_AGAIN_FRAC = 0.1
"""An engine declares its capacity again when its speed differs by this share from the last declaration."""
SWITCH_INTERVAL_S = 0.0005
"""Seconds that a thread of a rollout worker may hold the interpreter lock while another waits for it."""


class WorkerEngine:
    """The engine of one worker in a run; ``kind`` describes the current or the last engine."""

    def __init__(self, context: WorkerContext, kind: EngineKind) -> None:
        self.context, self.kind = context, kind
        alarms = context.spec.config.trainer
        self.serving = Serving(
            Path(context.spec.from_checkpoint or context.model_dir),
            build=partial(make_engine, context.spec.config, kind),
            newest=context.weights.newest,
            report=self._report,
            store=context.weights.store,
            scratch=Path(context.worker.local_directory),
            one_model=ONE_MODEL_AT_A_TIME,
            recheck=any(alarms.mismatch_args.values()),
        )
        self.kv: KVTransfers | None = None
        self._ahead: tuple[int, ...] | None = None  # rank of the best waiting generation, as the scheduler knows it
        self._ranks: dict[str, tuple[int, ...]] = {}  # ranks of tasks here that changed after dispatch
        self._model = architecture_of(read_model_config(context.model_dir))
        self._declared: EngineCapacity | None = None
        self._next_look = 0  # passes after which the capacity is checked again
        self._pulls: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self, *, asleep: bool) -> None:
        """Start the engine, or if ``asleep``, only prepare it for `wake`."""
        context, name = self.context, self.context.name
        if asleep:
            self.serving.asleep = True
        else:
            await self.serving.start()
        # Before the report: the scheduler then sends these messages, and an unknown message closes the worker.
        context.listen("libra-version", self._version_announced)
        context.listen("libra-ahead", self._ahead_announced)
        context.listen("libra-rank", self._rank_announced)
        host_gib = context.spec.config.rollout.kv_host_gib
        if host_gib is not None:
            self.kv = KVTransfers(context, self.serving, int(host_gib * GIB))
            context.listen("libra-kv", self.kv.announced)
        kv = None if self.kv is None else self.kv.address
        self._report(EngineJoined(name, self.kind.fields, context.weights.offered, kv))
        if asleep:
            self._report(EngineSlept(name))
        # The engine's thread and this event loop share one lock; at 5 ms, Python's default, the loop waits for whole steps.
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    async def load_newest(self) -> None:
        """Load the newest version when a worker joins; its first task gets any EngineError."""
        newest = await self.context.weights.newest()
        self.serving.announced = newest.number if newest is not None else 0
        try:
            await self.serving.pull()
        except EngineError as error:
            logger.error("worker %s: %s", self.context.name, error)

    async def close(self) -> None:
        self._closing = True
        if self.kv is not None:
            self.kv.close()
        await self.serving.close()

    async def generate(self, key: str, request: TurnRequest) -> TurnOutput:
        """Generate a turn for task ``key``, with KV that the old owner sends, if any."""
        return await (self.serving.generate(request) if self.kv is None else self.kv.generate(key, request))

    # ---------------------------------------------------------------- versions and ranks

    def _version_announced(
        self, version: int, holders: Sequence[Sequence[Any]] = (), digest: str | None = None, **extra: Any
    ) -> None:
        self.serving.announced = max(self.serving.announced, version)
        self.context.weights.announced(version, holders, digest)
        task = asyncio.ensure_future(self._pull_announced())
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)

    async def _pull_announced(self) -> None:
        try:
            await self.serving.pull()
        except LibraError as error:
            if not self._closing:
                run = self.context.spec.run
                logger.warning("run %s: a version was not loaded, the next quantum tries again: %s", run, error)

    def _ahead_announced(self, ahead: Sequence[int] | None, **extra: Any) -> None:
        self._ahead = None if ahead is None else tuple(ahead)

    def _rank_announced(self, key: str, rank: Sequence[int], **extra: Any) -> None:
        self._ranks[key] = tuple(rank)

    def began(self, key: str) -> None:
        """Forget the announced rank of a task that was sent again, with its current priority."""
        self._ranks.pop(key, None)

    def keeps_slot(self, key: str) -> bool:
        """Whether a running task may keep its slot for another generation."""
        return not leaves_slot(self._ranks.get(key) or priority_here(self.context.worker, key), self._ahead)

    # ---------------------------------------------------------------- reports

    def turn_ended(self) -> None:
        """Declare the capacity again if the speed has changed, at most once per 1/8 more passes."""
        passes = self.serving.engine.stats().steps
        if passes >= self._next_look:
            self._next_look = passes + max(FEWEST_PASSES // 2, min(passes, KEPT_PASSES) // 8)
            self._declare()

    def _declare(self, *, always: bool = False) -> None:
        now, before = self.serving.engine.capacity(), self._declared
        if not always and before is not None and off_by_frac(now, before) <= DECLARED_AGAIN_FRAC:
            return
        self._declared = now
        if always:
            self._next_look = 0
        kind, declared = self.kind, now.declaration()
        self.context.report(EngineDeclared(self.context.name, kind.engine, kind.bucket, self._model, **declared))

    def _report(self, fact: Fact) -> None:
        if isinstance(fact, EngineJoined | EngineWoke | VersionServed) and not self.serving.asleep:
            self._declare(always=not isinstance(fact, VersionServed))
        if isinstance(fact, VersionServed):
            fact = replace(fact, tp=self.kind.tp, bucket=self.kind.bucket, stats=stats_of(self.serving.engine))
        self.context.report(replace(fact, worker=self.context.name))
