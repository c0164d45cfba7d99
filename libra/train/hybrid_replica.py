"""A hybrid replica: outside the core's process group, it computes slices of each step.

A hybrid has no optimizer. It may join and leave between any two steps, or die during a step: then
the core computes its slice (`libra.train.hybrid_pool`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from libra.errors import TrainError, TransferError
from libra.train.hybrid_pool import Message, Wire, connect, from_tensors
from libra.train.replica import Replica
from libra.train.step_report import Tally

logger = logging.getLogger(__name__)


class HybridReplica:
    """Computes slices for the core at ``address``, until it leaves or the core releases it.
    ``replica`` has the core's model and settings; its weights are replaced. TransferError if no
    core with ``token`` listens at ``address``."""

    def __init__(self, replica: Replica, address: tuple[str, int], token: str, *, name: str = "hybrid") -> None:
        self.replica = replica
        self.name = name
        self.version = -1
        """Number of the weights it has; -1 before the first arrived."""
        self.slices_done = 0
        self.on_state: Callable[[], None] | None = None
        """Called in the thread of `run` when its first weights have arrived."""
        self._wire: Wire = connect(address, token)
        self._pending: Message | None = None
        self._leaving = threading.Event()
        self._wire.send("hello", {"name": name, "description": replica.description()})

    def run(self) -> int:
        """Serve until `leave` or the core's end; returns the number of slices computed. TrainError
        if the core has another model or other settings."""
        try:
            while True:
                message = self._wire.receive()
                match message.kind:
                    case "stepped":
                        if message.fields["version"] > self.version:
                            self._wire.send("pull")
                    case "state":
                        self._take(message.tensors, message.fields["version"])
                    case "work":
                        self._pending = message
                        self._work()
                    case "refused":
                        raise TrainError(f"hybrid {self.name}: the core refuses it: {message.fields['reason']}")
                    case "bye":
                        break
        except TransferError as fault:
            log = logger.info if self._leaving.is_set() else logger.warning
            log("hybrid %s: the core has ended after %d slices: %s", self.name, self.slices_done, fault)
        finally:
            self._wire.close()
        return self.slices_done

    def leave(self) -> None:
        """Request to leave, from any thread; a slice in progress counts and is the last."""
        self._leaving.set()
        self._wire.send("leave")

    def abandon(self) -> None:
        """Disconnect at once, from any thread; the core computes a slice in progress."""
        self._leaving.set()
        self._wire.close()

    def _take(self, weights: Mapping[str, Tensor], version: int) -> None:
        if version > self.version:
            self.replica.take_weights(weights)
            first, self.version = self.version < 0, version
            if first and self.on_state is not None:
                self.on_state()
        self._wire.send("have", {"version": self.version})
        self._work()

    def _work(self) -> None:
        message = self._pending
        if message is None or message.fields["version"] > self.version:  # the slice's weights have not arrived
            return
        self._pending = None
        if message.fields["version"] < self.version:  # newer weights make the slice obsolete
            return
        fields, parameters = message.fields, self.replica.optimized()
        ticket, tally = fields["ticket"], Tally(stepped=bool(fields["stepped"]))
        try:
            weight = self.replica.gradient.accumulate(from_tensors(message.tensors), fields["step"], tally)
        except TrainError as fault:
            self._wire.send("failed", {"ticket": ticket, "reason": str(fault)})
        else:
            gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            facts = {"ticket": ticket, "weight_sum": weight, "sums": tally.sums, "maxima": tally.maxima}
            self._wire.send("gradient", facts, gradients)
            self.slices_done += 1
        finally:
            for parameter in parameters.values():
                parameter.grad = None
