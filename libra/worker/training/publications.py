"""Publishes a trainer's weights with their check, concurrently with its next step.

The passes of step ``v`` and the publication of version ``v`` read the same weights in separate
threads. A step whose passes end first waits for the publication, or publishes the version itself.

Invariants
----------
1. Step v+1 changes weights only after version v is written, synced and reported; no version is
   skipped.
2. This process publishes and reports a version once; a late task gets the existing version.
3. Steps repeated from committed batches publish nothing: ``restore`` publishes missing versions, in
   order and with the same bits.
4. The check has the trainer's answers, which an engine with this version reproduces.
   Log-probabilities of the previous version and of version 0 come from their published checks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from libra.projections import project_tensors
from libra.weights import WeightStore, WeightVersion
from libra.weights.version_check import Logps, VersionCheck

if TYPE_CHECKING:
    from libra.train import Replica

logger = logging.getLogger(__name__)

PROBES, PROBE_TOKENS, PROBE_SEED = 1, 32, 20260603


class Publications:
    """The publications of one replica; a group publishes before its next step, by the same calls.

    ``max_context_tokens``: the engines' limit for checks; ``report`` announces a version.
    """

    def __init__(self, store: WeightStore, max_context_tokens: int, report: Callable[[WeightVersion], None]) -> None:
        self.store, self.max_context_tokens, self.report = store, max_context_tokens, report
        self.replica: Replica | None = None
        self.alone = False
        """Whether no other rank has to agree with the weights."""
        self.beside = False
        """Whether versions are published beside the next step, not before it."""
        self._lock = threading.Lock()
        self._changing = -1  # these weights are published, and the step is changing or has changed them
        self._reported = -1
        self._thread = threading.local()

    def of(self, replica: Replica, *, alone: bool) -> None:
        """Publish this replica's weights; concurrently with steps if ``alone`` and supported."""
        self.replica, self._changing, self.alone = replica, -1, alone
        self.beside = alone and replica.score_beside()
        if alone:
            replica.before_change = self.before_change

    def publish(self, version: int) -> WeightVersion:
        """Publish and report, once, the weights after ``version`` steps.

        Raises WeightsError if the store refuses, or lacks a version that the replica is past.
        """
        with self._lock:
            return self._publish(version)

    def begin(self, version: int) -> None:
        """Publish a version in a thread; `publish` waits for it, and retries if it failed."""
        threading.Thread(target=self._publish_beside, args=(version,), name="libra-publication", daemon=True).start()

    def _publish_beside(self, version: int) -> None:
        try:
            self.publish(version)
        except Exception as error:  # the boundary of this thread; the task of the publication raises it
            logger.warning("version %d is not published yet: %s", version, error, exc_info=True)

    def before_change(self, step: int) -> float:
        """Publish the weights before step ``step`` changes them; returns seconds waited."""
        if getattr(self._thread, "repeats", False):
            return 0.0
        began_s = time.perf_counter()
        with self._lock:
            if self._changing < step:
                if step > max(self.store.numbers(), default=-1):
                    self._publish(step)
                self._changing = step
        return time.perf_counter() - began_s

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Context in which this thread repeats committed steps."""
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

    def assist(self) -> None:
        """Take part in rank 0's publication collectives, on other ranks of a sharded replica."""
        assert self.replica is not None, "a rank assists before there is a replica"
        self.replica.all_weights()
        _probe(self.replica, self.max_context_tokens)


def _probe(replica: Replica, max_context_tokens: int) -> tuple[tuple[tuple[int, ...], ...], Logps]:
    """Fixed token ids, equal across a run, and the replica's log-probabilities of them in nats."""
    rng, length = np.random.default_rng(PROBE_SEED), min(PROBE_TOKENS, max_context_tokens)
    vocabulary = int(replica.model.config.get_text_config().vocab_size)
    rows = [rng.integers(0, vocabulary, length).astype(np.int32) for _ in range(PROBES)]
    logp = tuple(tuple(float(nats) for nats in replica.score(row)) for row in rows)
    return tuple(tuple(row.tolist()) for row in rows), logp


def publish_checked(store: WeightStore, replica: Replica, version: int, max_context_tokens: int) -> WeightVersion:
    """Publish the weights as ``version`` with their check, if new. Raises WeightsError."""
    tensors = replica.all_weights()
    # A sharded model's passes are collectives: all ranks enter in one order; see `Publications.assist`.
    sharded = _probe(replica, max_context_tokens) if replica.is_sharded else None

    def check(content: str) -> str:
        probe, logp = sharded or _probe(replica, max_context_tokens)
        text = store.check_text(version - 1) if version > 0 else None
        before = None if text is None else VersionCheck.from_json(text, f"version {version - 1} under {store.root}")
        known = before if before is not None and before.probe == probe else None
        return VersionCheck(
            version=version,
            digest=content,
            dtype=str(replica.dtype).removeprefix("torch."),
            seed=version,
            projections=project_tensors(tensors, version),
            probe=probe,
            logp=logp,
            previous_logp=None if known is None else known.logp,
            first_logp=logp if version == 0 else None if known is None else known.first_logp,
        ).to_json()

    return store.publish(version, tensors, check=check, content=replica.content)
