"""The core's side of hybrid replicas: rank 0 sends them slices and receives their sums.

Invariants
----------
1. The training thread waits for hybrids only in `collect`, until each answers, is lost, or is
   silent for ``timeout_s``; and before a step, at most one tensor long, for a copy for a joiner to
   yield (`undisturbed`).
2. A hybrid gets a slice only after it has reported that a state arrived; until then it contributes
   zeros.
3. Every assignment has a number that is never used again; answers to other numbers are dropped.
4. A contribution is whole (all tensors arrived) or None, and returned once.
5. Weights are copied while nothing changes them (`quiet`), under a number that only grows: no state
   is torn, and a hybrid computes a slice only with weights of the number that came with it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from libra.errors import TransferError
from libra.train.samples import Sample
from libra.train.wire import PURPOSE, Message, Wire, to_tensors
from libra.transport import Channel, Server

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""Seconds that the core, after its own slice, waits for a hybrid that neither answers nor disconnects."""


_TRAFFIC = ("hybrid_sent_bytes", "hybrid_received_bytes", "hybrid_copy_s", "hybrid_blocked_s")
"""Fields of `libra.train.step_report.StepReport`."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A hybrid's part of a minibatch: undivided sums by parameter, the sum of weights, and a tally's sums."""

    gradients: dict[str, Tensor]
    weight_sum: float
    sums: dict[str, float]
    maxima: dict[str, float]


@dataclass(slots=True, eq=False)
class _Hybrid:
    name: str
    wire: Wire
    outgoing: queue.SimpleQueue[tuple[str, dict[str, Any], dict[str, Tensor]] | None] = field(
        default_factory=queue.SimpleQueue
    )
    has_state: bool = False
    leaving: bool = False
    gone: bool = False
    ticket: int | None = None  # of the slice it is computing
    result: Contribution | None = None


class HybridPool:
    """The hybrid replicas of one core, on its rank 0.

    Parameters
    ----------
    token : str
        The secret that a hybrid must have; a new one in each epoch of the group.
    description : dict
        Compared with a hybrid's own (`libra.train.replica_state.ReplicaState.description`). A hybrid that
        differs is refused with the reason.
    source : callable, optional
        Returns the weights for a hybrid that joins between steps; without it the hybrid waits for a step.

    ``stale`` is True if the weights have changed since they were last published.
    """

    def __init__(
        self,
        token: str,
        description: Mapping[str, Any],
        *,
        source: Callable[[], Mapping[str, Tensor]] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._description, self._timeout_s = dict(description), timeout_s
        self.stale = True
        self.quiet = threading.RLock()
        """Held while weights change, or are copied."""
        self._hurry = threading.Event()  # a step begins: a copy between steps has to stop
        self._source = source
        self._changed = threading.Condition()
        self._hybrids: list[_Hybrid] = []
        self._working: list[_Hybrid | None] = []  # by slice; None: there was no hybrid for it
        self._ticket = self._version = 0
        self._weights: dict[str, Tensor] | None = None
        self._traffic = dict.fromkeys(_TRAFFIC, 0.0)
        self._closed = False
        self._server = Server(self._serve, secret=token, purpose=PURPOSE, host=host, port=port, silence_s=None)

    @property
    def address(self) -> tuple[str, int]:
        return self._server.address

    # ---------------------------------------------------------------- of the training thread

    @property
    def connected(self) -> bool:
        with self._changed:
            return bool(self._hybrids)

    @property
    def num_members(self) -> int:
        """Hybrids that can be given a slice."""
        with self._changed:
            return len(self._members())

    @property
    def num_joining(self) -> int:
        """Hybrids that have no state yet."""
        with self._changed:
            return sum(not hybrid.has_state for hybrid in self._hybrids)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Around a step: no weights are copied, and a copy in progress stops."""
        started = time.perf_counter()
        self._hurry.set()
        with self.quiet:
            self._hurry.clear()
            self._traffic["hybrid_blocked_s"] += time.perf_counter() - started
            yield

    def publish(self, weights: Mapping[str, Tensor], *, gives_way: bool = False) -> None:
        """Copy stepped weights into host memory and announce them to every hybrid, which then pulls them.

        ``gives_way``: publish nothing if a step is about to begin, which will publish its result.
        """
        started = time.perf_counter()
        copied: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            if gives_way and self._hurry.is_set():
                return
            copied[name] = tensor.detach().to("cpu", copy=True)
        with self._changed:
            self._weights, self.stale = copied, False
            self._version += 1
            self._traffic["hybrid_copy_s"] += time.perf_counter() - started
            for hybrid in self._hybrids:
                hybrid.outgoing.put(("stepped", {"version": self._version}, {}))

    def assign(self, slices: Sequence[Sequence[Sample]], step: int, *, stepped: bool) -> None:
        """Give each hybrid a slice, in the order they joined; slices without a hybrid are lost."""
        with self._changed:
            for hybrid in self._hybrids:  # slices of a failed step were not collected
                hybrid.ticket = hybrid.result = None
            self._release_leaving()
            self._working = [None] * len(slices)
            for number, (hybrid, samples) in enumerate(zip(self._members(), slices, strict=False)):
                self._ticket += 1
                hybrid.ticket, hybrid.result = self._ticket, None
                fields = {"ticket": self._ticket, "version": self._version, "step": step, "stepped": stepped}
                hybrid.outgoing.put(("work", fields, to_tensors(samples)))
                self._working[number] = hybrid

    def collect(self) -> list[Contribution | None]:
        """Wait for the contributions, in the order of `assign`; None if a slice is lost."""
        until_s = time.monotonic() + self._timeout_s
        with self._changed:
            working = [hybrid for hybrid in self._working if hybrid is not None]
            while waited_for := [hybrid for hybrid in working if hybrid.ticket is not None and not hybrid.gone]:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    for hybrid in waited_for:
                        logger.warning(
                            "hybrid %s was silent for %.0f s: its slice goes to the core", hybrid.name, self._timeout_s
                        )
                        self._drop(hybrid)
                    break
                self._changed.wait(left_s)
            results = [None if hybrid is None else hybrid.result for hybrid in self._working]
            for hybrid in working:
                hybrid.ticket = hybrid.result = None
            self._working = []
            self._release_leaving()
            return results

    def traffic(self) -> dict[str, float]:
        """Bytes and seconds since the last call, by field of `libra.train.step_report.StepReport`."""
        with self._changed:
            found, self._traffic = self._traffic, dict.fromkeys(_TRAFFIC, 0.0)
            return found

    def wait_for(self, num_hybrids: int, timeout_s: float | None = None, *, joining: bool = False) -> bool:
        """Wait until this many can be given a slice, or with ``joining`` are connected; False after
        ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self._hybrids if joining else self._members()) >= num_hybrids, timeout_s
            )

    def close(self) -> None:
        """Disconnect every hybrid and stop listening."""
        with self._changed:
            self._closed = True
            for hybrid in list(self._hybrids):
                self._drop(hybrid)
        self._server.close()

    # ---------------------------------------------------------------- under the lock

    def _members(self) -> list[_Hybrid]:
        return [hybrid for hybrid in self._hybrids if hybrid.has_state and not hybrid.leaving]

    def _drop(self, hybrid: _Hybrid) -> None:
        if not hybrid.gone:
            hybrid.gone = True
            hybrid.outgoing.put(None)
            hybrid.wire.close()
        if hybrid in self._hybrids:
            self._hybrids.remove(hybrid)
        self._changed.notify_all()

    def _release_leaving(self) -> None:
        for hybrid in self._hybrids:
            if hybrid.leaving and hybrid.ticket is None:
                hybrid.outgoing.put(("bye", {}, {}))

    # ---------------------------------------------------------------- threads

    def _serve(self, channel: Channel, name: str) -> None:
        wire = Wire(channel)
        try:
            hello = wire.receive()
        except TransferError as fault:
            logger.warning("hybrid pool: %s was refused: %s", name, fault)
            return
        hybrid = _Hybrid(str(hello.fields.get("name", name)), wire)
        if difference := _difference(self._description, hello.fields.get("description", {})):
            logger.warning("hybrid %s was refused: %s", hybrid.name, difference)
            with contextlib.suppress(TransferError):
                wire.send("refused", {"reason": difference})
            wire.close()
            return
        threading.Thread(target=self._write, args=(hybrid,), name=f"libra-hybrid-{name}-out", daemon=True).start()
        with self._changed:
            if self._closed:
                self._drop(hybrid)
                return
            self._hybrids.append(hybrid)
            if self._weights is not None and not self.stale:
                hybrid.outgoing.put(("stepped", {"version": self._version}, {}))
            self._changed.notify_all()
        self._offer_between_steps()
        try:
            while True:
                self._handle(hybrid, wire.receive())
        except TransferError as fault:
            log = logger.info if hybrid.leaving or hybrid.gone or self._closed else logger.warning
            log("hybrid %s is gone: %s", hybrid.name, fault)
        finally:
            with self._changed:
                self._drop(hybrid)

    def _offer_between_steps(self) -> None:
        """Offer a joiner the weights, unless a step is in progress, which offers them at its end."""
        if self._source is not None and self.quiet.acquire(blocking=False):
            try:
                if self.stale:
                    self.publish(self._source(), gives_way=True)
            finally:
                self.quiet.release()

    def _handle(self, hybrid: _Hybrid, message: Message) -> None:
        with self._changed:
            self._traffic["hybrid_received_bytes"] += message.num_bytes
            match message.kind:
                case "pull":
                    if self._weights is not None:
                        hybrid.outgoing.put(("state", {"version": self._version}, self._weights))
                case "have":
                    hybrid.has_state = True
                case "gradient" if message.fields["ticket"] == hybrid.ticket:
                    fields = message.fields
                    hybrid.result = Contribution(
                        message.tensors, fields["weight_sum"], fields["sums"], fields["maxima"]
                    )
                    hybrid.ticket = None
                case "failed" if message.fields["ticket"] == hybrid.ticket:
                    logger.warning("hybrid %s: its slice goes to the core: %s", hybrid.name, message.fields["reason"])
                    hybrid.ticket = None
                case "leave":
                    hybrid.leaving = True
                    if hybrid not in self._working:
                        self._release_leaving()
            self._changed.notify_all()

    def _write(self, hybrid: _Hybrid) -> None:
        while (message := hybrid.outgoing.get()) is not None:
            try:
                num_bytes = hybrid.wire.send(*message)
            except TransferError as fault:
                log = logger.info if hybrid.leaving or hybrid.gone or self._closed else logger.warning
                log("hybrid %s gets no more messages: %s", hybrid.name, fault)
                with self._changed:
                    self._drop(hybrid)
                return
            with self._changed:
                self._traffic["hybrid_sent_bytes"] += num_bytes


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {str(theirs.get(name))[:200]} there and {str(ours.get(name))[:200]} in the core"
    return None
