"""The shared context of a run on a worker: worker, run, and the scheduler's messages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import Worker

from libra.cluster.settings import bound_key_cache
from libra.envs import Environment
from libra.facts import STREAM_OP, Fact, pack
from libra.store.start_records import Epoch
from libra.store.trajectory_journal import Journal
from libra.worker.model_files import WorkerWeights
from libra.worker.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """One start of a run on one worker, with its local model directory and environment (set up)."""

    worker: Worker
    spec: RunSpec
    model_dir: Path
    epoch: Epoch
    environment: Environment
    journal: Journal
    weights: WorkerWeights
    _sender: FactSender = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sender", FactSender(self.worker, self.spec.run, self.spec.epoch))

    @property
    def name(self) -> str:
        return str(self.worker.name)

    @property
    def address(self) -> str:
        return self.worker.address

    def report(self, *facts: Fact) -> None:
        bound_key_cache()  # each task of a run reports something
        self._sender.send(*facts)

    def listen(self, op: str, handler: Callable[..., None]) -> None:
        """Call ``handler`` with each of the scheduler's messages ``op`` for this start of the run.

        Runs on the worker's stream: the handler must not wait, and an exception closes the worker.
        """
        listeners = self.worker.stream_handlers.setdefault(op, _Listeners())
        assert isinstance(listeners, _Listeners)
        listeners[self.spec.run, self.spec.epoch] = handler

    def stop_listening(self) -> None:
        """Remove all handlers of this start."""
        for listeners in self.worker.stream_handlers.values():
            if isinstance(listeners, _Listeners):
                listeners.pop((self.spec.run, self.spec.epoch), None)


class _Listeners(dict[tuple[str, int], Callable[..., None]]):
    """Handlers of one ``op`` by (run, epoch); a message without a run goes to all of them."""

    def __call__(self, run: str | None = None, epoch: int = 0, **fields: Any) -> None:
        for of, handler in [*self.items()]:
            if run is None or of == (run, epoch):
                handler(**fields)


class FactSender:
    """Sends a worker's facts of one start of a run to the scheduler."""

    def __init__(self, worker: Worker, run: str, epoch: int) -> None:
        self._worker, self._run, self._epoch = worker, run, epoch
        self._unsent: list[Fact] = []

    def send(self, *facts: Fact) -> None:
        """Send facts, batched per pass of the event loop, before any task that ends in the pass."""
        if threading.get_ident() != self._worker.thread_id:
            self._worker.loop.add_callback(self.send, *facts)
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unsent.extend(facts)

    def flush(self) -> None:
        if self._unsent:
            packed = pack(self._unsent)
            self._unsent.clear()
            self._worker.batched_send({"op": STREAM_OP, "run": self._run, "epoch": self._epoch, "packed": packed})
