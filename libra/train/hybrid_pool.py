"""The core's side of hybrid replicas: rank 0 listens, gives them slices, takes their sums; they come and go as they like.

Invariants
----------
1. The training thread never waits for a joiner or for a send: each hybrid has a thread that reads and one that writes. It
   waits in `collect`, for slices it gave, and there until a hybrid answers, is gone, or is silent for ``timeout_s``; and to
   begin a step, until a copy of the weights for a joiner has given way (`undisturbed`): one tensor at most.
2. A hybrid is given a slice only once it has answered that a state arrived; until then it counts for nothing (zeros).
3. Every assignment has a number that is never used again. What answers another one is dropped: a step taken again, or a
   hybrid given up on, adds nothing late.
4. A contribution is whole (all tensors arrived) or None, and given out once.
5. Weights go out as a copy made while nothing changes them (`quiet`), under a number that only grows: no state is torn,
   and a hybrid computes a slice only with weights of the number that came with it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from libra.errors import TransferError
from libra.train.minibatch_slices import to_tensors
from libra.train.sequence_packing import Sample
from libra.train.wire import Message, Wire, accept

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""How long the core, done with its own slice, waits for a hybrid that neither answers nor hangs up."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A hybrid's part of a minibatch: undivided sums of weight x gradient by parameter, the sum of weights, and a tally's."""

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
    """Hybrid replicas of one core, as its rank 0 knows them.

    Parameters
    ----------
    token : str
        What a hybrid has to know; made anew for each epoch of the group.
    description : dict
        Compared with a hybrid's own (`libra.train.replica.Replica.description`): settings, dtype, names and shapes. One that
        differs is refused, and told why.
    source : callable, optional
        Gives the weights, for a joiner that comes between steps. None: it has to wait for the next step.
    host, port
        Where to listen; port 0 takes any.
    timeout_s : float

    Attributes
    ----------
    address : (str, int)
        Where hybrids connect.
    stale : bool
        Whether the weights have changed since they were last published.
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
        self._token, self._description, self._timeout_s = token, dict(description), timeout_s
        self._listener = socket.create_server((host, port))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.stale = True
        self.quiet = threading.RLock()
        """Held by whoever changes the weights, or copies them."""
        self._hurry = threading.Event()  # whoever copies between steps is to stop: one begins
        self._source = source
        self._changed = threading.Condition()
        self._hybrids: list[_Hybrid] = []
        self._asked: list[_Hybrid] = []
        self._ticket = self._version = self._planned = 0
        self._weights: dict[str, Tensor] | None = None
        self._sent_bytes = self._received_bytes = 0
        self._copy_s = self._blocked_s = 0.0
        self._closed = False
        threading.Thread(target=self._accept, name="libra-hybrids", daemon=True).start()

    # ---------------------------------------------------------------- of the training thread

    @property
    def connected(self) -> bool:
        """Whether any hybrid is there, with its state or without."""
        with self._changed:
            return bool(self._hybrids)

    @property
    def num_members(self) -> int:
        """Hybrids that can be given a slice."""
        with self._changed:
            return len(self._members())

    @property
    def num_joining(self) -> int:
        """Hybrids whose state is under way; they contribute zeros."""
        with self._changed:
            return sum(not hybrid.has_state for hybrid in self._hybrids)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """For the training thread, around a step: nobody copies the weights, and whoever just did gives way."""
        started = time.perf_counter()
        self._hurry.set()
        with self.quiet:
            self._hurry.clear()
            self._blocked_s += time.perf_counter() - started
            yield

    def publish(self, weights: Mapping[str, Tensor], *, gives_way: bool = False) -> None:
        """Copy stepped weights into host memory and tell every hybrid that it can pull them.

        ``gives_way``: nothing is published where a step is about to begin; it will publish what comes out of it.
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
            self._copy_s += time.perf_counter() - started
            for hybrid in self._hybrids:
                hybrid.outgoing.put(("stepped", {"version": self._version}, {}))

    def assign(self, slices: Sequence[Sequence[Sample]], step: int, *, stepped: bool) -> None:
        """Give each hybrid a slice, in the order they came; where fewer are left than were planned with, the rest is lost."""
        with self._changed:
            for hybrid in self._hybrids:  # of a step that failed nobody collects the slices
                hybrid.ticket = hybrid.result = None
            self._say_goodbye()
            members = self._members()[: len(slices)]
            self._asked = []
            for hybrid, samples in zip(members, slices, strict=False):
                self._ticket += 1
                hybrid.ticket, hybrid.result = self._ticket, None
                fields = {"ticket": self._ticket, "version": self._version, "step": step, "stepped": stepped}
                hybrid.outgoing.put(("work", fields, to_tensors(samples)))
                self._asked.append(hybrid)
            self._planned = len(slices)

    def collect(self) -> list[Contribution | None]:
        """What the hybrids made of their slices, in the order of `assign`; None where a slice is lost. Waits for them."""
        until_s = time.monotonic() + self._timeout_s
        with self._changed:
            while waited_for := [hybrid for hybrid in self._asked if hybrid.ticket is not None and not hybrid.gone]:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    for hybrid in waited_for:
                        logger.warning(
                            "hybrid %s was silent for %.0f s: its slice goes to the core", hybrid.name, self._timeout_s
                        )
                        self._drop(hybrid)
                    break
                self._changed.wait(left_s)
            results = [hybrid.result for hybrid in self._asked]
            for hybrid in self._asked:
                hybrid.ticket = hybrid.result = None
            self._asked = []
            self._say_goodbye()
            return results + [None] * (self._planned - len(results))

    def traffic(self) -> dict[str, float]:
        """Bytes and seconds since the last call, under the names of `libra.train.step_report.StepReport`."""
        with self._changed:
            found = {
                "hybrid_sent_bytes": float(self._sent_bytes),
                "hybrid_received_bytes": float(self._received_bytes),
                "hybrid_copy_s": self._copy_s,
                "hybrid_blocked_s": self._blocked_s,
            }
            self._sent_bytes = self._received_bytes = 0
            self._copy_s = self._blocked_s = 0.0
            return found

    def wait_for(self, num_hybrids: int, timeout_s: float | None = None, *, joining: bool = False) -> bool:
        """Wait until this many can be given a slice, or with ``joining`` are there at all; False: ``timeout_s`` is over."""
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self._hybrids if joining else self._members()) >= num_hybrids, timeout_s
            )

    def wait_empty(self, timeout_s: float | None = None) -> bool:
        """Wait until no hybrid is there; False where ``timeout_s`` was over first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._hybrids, timeout_s)

    def close(self) -> None:
        """Let every hybrid go and listen no more."""
        with self._changed:
            self._closed = True
            for hybrid in list(self._hybrids):
                self._drop(hybrid)
        self._listener.close()

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

    def _say_goodbye(self) -> None:
        for hybrid in self._hybrids:
            if hybrid.leaving and hybrid.ticket is None:
                hybrid.outgoing.put(("bye", {}, {}))

    # ---------------------------------------------------------------- threads

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                return  # closed
            name = f"{peer[0]}:{peer[1]}"
            threading.Thread(
                target=self._serve, args=(connection, name), name=f"libra-hybrid-{name}", daemon=True
            ).start()

    def _serve(self, connection: socket.socket, name: str) -> None:
        """Read what one hybrid says until it is gone."""
        try:
            wire = accept(connection, self._token)
            hello = wire.receive()
        except TransferError as fault:
            logger.warning("hybrid pool: %s was turned away: %s", name, fault)
            return
        hybrid = _Hybrid(str(hello.fields.get("name", name)), wire)
        if difference := _difference(self._description, hello.fields.get("description", {})):
            logger.warning("hybrid %s was turned away: %s", hybrid.name, difference)
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
                self._heard(hybrid, wire.receive())
        except TransferError as fault:
            log = logger.info if hybrid.leaving or hybrid.gone or self._closed else logger.warning
            log("hybrid %s is gone: %s", hybrid.name, fault)
        finally:
            with self._changed:
                self._drop(hybrid)

    def _offer_between_steps(self) -> None:
        """Give a joiner the weights at once where no step is under way; one that is gives them when it is done."""
        if self._source is not None and self.quiet.acquire(blocking=False):
            try:
                if self.stale:
                    self.publish(self._source(), gives_way=True)
            finally:
                self.quiet.release()

    def _heard(self, hybrid: _Hybrid, message: Message) -> None:
        with self._changed:
            self._received_bytes += message.num_bytes
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
                    if hybrid not in self._asked:
                        self._say_goodbye()
            self._changed.notify_all()

    def _write(self, hybrid: _Hybrid) -> None:
        """Send what is queued for one hybrid."""
        while (message := hybrid.outgoing.get()) is not None:
            try:
                num_bytes = hybrid.wire.send(*message)
            except TransferError as fault:
                logger.info("hybrid %s cannot be reached: %s", hybrid.name, fault)
                with self._changed:
                    self._drop(hybrid)
                return
            with self._changed:
                self._sent_bytes += num_bytes


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first field in which two descriptions differ, None where they agree."""
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {str(theirs.get(name))[:200]} there and {str(ours.get(name))[:200]} in the core"
    return None
