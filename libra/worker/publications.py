"""Publishes the weights of a trainer beside its next step, which changes none of them before they are published.

Forward and backward passes of step ``v`` read the weights ``v``, and so does the publication of version ``v``: both run at once, in
threads of their own. A step whose passes end first waits for that thread, or publishes the version itself if none does.

Invariants
----------
1. Weights ``v`` change only once version ``v`` is written, synced and reported: a step that was taken leaves no version out.
2. A version is published and reported once by this process; the task that comes late gets what is there.
3. Steps that are repeated from committed batches publish nothing: what is missing then is published by ``restore``, in order.

A trainer that dies in between has a version that is whole or absent (`libra.weights.registry`). Its successor repeats committed
batches and publishes what is missing, which are the same bits: a step needs its batch, the weights before it and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from libra.weights import WeightStore, WeightVersion
from libra.worker.weight_publishing import publish_checked

if TYPE_CHECKING:
    from libra.train import Replica

logger = logging.getLogger(__name__)


class Publications:
    """Of one replica that trains alone; a group publishes before its next step, with the same calls.

    Parameters
    ----------
    store : WeightStore
    max_context_tokens : int
        Of the engines, which answer the questions of the check.
    report : callable
        Announces a version that is published.
    """

    def __init__(self, store: WeightStore, max_context_tokens: int, report: Callable[[WeightVersion], None]) -> None:
        self.store, self.max_context_tokens, self.report = store, max_context_tokens, report
        self.replica: Replica | None = None
        self.alone = False
        """Whether no other rank has to agree with the weights."""
        self.beside = False
        """Whether versions are published beside the next step, not before it."""
        self._lock = threading.Lock()
        self._changing = -1  # the weights of this step, published, are being changed or were
        self._reported = -1
        self._thread = threading.local()

    def of(self, replica: Replica, *, alone: bool) -> None:
        """Publish this replica's weights from now on; of one that trains ``alone`` beside its steps, if its model allows it."""
        self.replica, self._changing, self.alone = replica, -1, alone
        self.beside = alone and replica.score_beside()
        if alone:
            replica.before_change = self.before_change

    def publish(self, version: int) -> WeightVersion:
        """Publish the weights after ``version`` steps, and report it, once.

        Raises
        ------
        WeightsError
            As `libra.weights.WeightStore.publish`; or the replica is past this version, and the store has it no more.
        """
        with self._lock:
            return self._publish(version)

    def begin(self, version: int) -> None:
        """Publish a version in a thread of its own. `publish` waits for it, and publishes again what failed."""
        threading.Thread(target=self._begun, args=(version,), name="libra-publication", daemon=True).start()

    def _begun(self, version: int) -> None:
        try:
            self.publish(version)
        except Exception as error:  # the boundary of this thread; the task of the publication raises it
            logger.warning("version %d is not published yet: %s", version, error, exc_info=True)

    def before_change(self, step: int) -> float:
        """Called by step ``step`` before it changes the weights: they are published when it returns. Seconds that it waited."""
        if getattr(self._thread, "repeats", False):
            return 0.0
        began_s = time.perf_counter()
        with self._lock:
            if self._changing < step:
                numbers = self.store.numbers()
                if step not in numbers and step > max(numbers, default=-1):
                    self._publish(step)
                self._changing = step
        return time.perf_counter() - began_s

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Steps that this thread takes meanwhile are repeated ones."""
        self._thread.repeats = True
        try:
            yield
        finally:
            self._thread.repeats = False

    def _publish(self, version: int) -> WeightVersion:
        assert self.replica is not None, "a version is published before there is a replica"
        if self.replica.steps_done > version or self._changing >= version:
            published = self.store.get(version)
        else:
            published = publish_checked(self.store, self.replica, version, self.max_context_tokens)
        if version > self._reported:
            self._reported = version
            self.report(published)
        return published
