"""The core's side of hybrid replicas: rank 0 sends slices and weights, and receives undivided sums.

A message is a frame ``{"kind": ..., "tensors": [[name, dtype, shape], ...], "fields": {...}}`` and
the bytes of its tensors. The frame is authenticated, the bytes are not, as in torch.distributed; a
message arrives whole or raises TransferError.

1. The training thread waits for hybrids only in `HybridPool.collect`, until each answers, is lost,
   or is silent for ``timeout_s``; and before a step in `HybridPool.undisturbed`, at most until one
   tensor is copied.
2. A hybrid gets a slice only after it has reported that weights arrived; until then it contributes
   zeros.
3. Every assignment has a number that is never used again; answers to other numbers are dropped.
4. A contribution is whole or None, and returned once.
5. Weights are copied while nothing changes them (`HybridPool.quiet`), under a number that only
   grows; a hybrid computes a slice only with the weights of the slice's number.
6. `from_tensors` returns the slice given to `to_tensors`, bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import TransferError, TransportError
from libra.train.samples import Sample
from libra.transport import Address, Channel, Server
from libra.transport import connect as connect_channel
from libra.types import Taught

logger = logging.getLogger(__name__)

PURPOSE = "hybrid replicas"
TIMEOUT_S = 60.0
"""Seconds that the core, after its own slice, waits for a silent but connected hybrid."""
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "bool", "uint8")
}
_TAUGHT, _FACTS = "taught", "facts"
_TRAFFIC = ("hybrid_sent_bytes", "hybrid_received_bytes", "hybrid_copy_s", "hybrid_blocked_s")
"""Fields of `libra.train.step_report.StepReport`."""


@dataclass(frozen=True, slots=True)
class Message:
    """A received message; ``num_bytes`` is the size of its frame and tensors."""

    kind: str
    fields: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    num_bytes: int = 0


class Wire:
    """One end of a connection: several threads may send whole messages, one thread receives."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()

    def send(
        self, kind: str, fields: Mapping[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> int:
        """Send one message and return its bytes. TransferError if the peer has disconnected."""
        plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in (tensors or {}).items()}
        described = [[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in plain.items()]
        with _as_transfer_error(f"sending {kind!r} failed"), self._sending:
            before = self._channel.sent_bytes
            self._channel.send_frame(kind=kind, tensors=described, fields=dict(fields or {}))
            self._channel.send_bytes([_bytes_of(tensor) for tensor in plain.values()])
            return self._channel.sent_bytes - before

    def receive(self) -> Message:
        """The next message. TransferError if the connection ends or sends something else."""
        with _as_transfer_error("receiving failed"):
            before = self._channel.received_bytes
            frame = self._channel.recv_frame()
            if frame is None:
                raise TransferError("wire: the other end has closed the connection")
            tensors = {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, dtype, shape in frame["tensors"]}
            self._channel.recv_bytes([_bytes_of(tensor) for tensor in tensors.values()])
            return Message(frame["kind"], frame["fields"], tensors, self._channel.received_bytes - before)

    def close(self) -> None:
        """End the connection; threads that wait in `receive` at either end get TransferError."""
        self._channel.close()


def connect(address: Address, token: str) -> Wire:
    """A wire to the server at ``address``; TransferError if there is none or ``token`` is wrong."""
    with _as_transfer_error("no handshake with the core"):
        return Wire(connect_channel(address, token, purpose=PURPOSE, silence_s=None))


@contextlib.contextmanager
def _as_transfer_error(what: str) -> Iterator[None]:
    try:
        yield
    except TransferError:
        raise
    except (
        TransportError,
        RuntimeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:  # torch: no such shape, no memory
        raise TransferError(f"wire: {what}: {error}") from error


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def to_tensors(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """A slice as flat tensors: each array of all samples, with shapes and other fields as JSON."""
    arrays: dict[str, list[NDArray[Any]]] = {}
    facts = []
    for sample in samples:
        named = {each.name: getattr(sample, each.name) for each in fields(sample) if each.name != _TAUGHT}
        named |= {
            f"{_TAUGHT}.{name}": each for name, each in (sample.taught._asdict() if sample.taught else {}).items()
        }
        held = {name: value for name, value in named.items() if isinstance(value, np.ndarray)}
        for name, value in held.items():
            arrays.setdefault(name, []).append(value.reshape(-1))
        facts.append([{name: value.shape for name, value in held.items()}, {n: named[n] for n in named.keys() - held}])
    flat = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in arrays.items()}
    return flat | {_FACTS: torch.from_numpy(np.frombuffer(json.dumps(facts).encode(), np.uint8).copy())}


def from_tensors(tensors: Mapping[str, Tensor]) -> list[Sample]:
    """The slice given to `to_tensors`."""
    arrays, at = {name: tensor.numpy() for name, tensor in tensors.items()}, dict.fromkeys(tensors, 0)
    samples = []
    for shapes, others in json.loads(arrays[_FACTS].tobytes()):
        found: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in others.items()}
        for name, shape in shapes.items():
            end = at[name] + math.prod(shape)
            found[name], at[name] = arrays[name][at[name] : end].reshape(shape), end
        taught = {
            n.removeprefix(f"{_TAUGHT}."): found.pop(n) for n in [n for n in found if n.startswith(f"{_TAUGHT}.")]
        }
        samples.append(Sample(**found, taught=Taught(**taught) if taught else None))
    return samples


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
    ticket: int | None = None  # number of the slice that the hybrid is computing
    result: Message | None = None


class HybridPool:
    """The hybrid replicas of one core, on its rank 0.

    A hybrid must have the secret ``token``, new in each epoch of the group, and the same
    ``description`` (`libra.train.replica_state.ReplicaState.description`). ``source`` returns the
    weights for a hybrid that joins between steps; without it the hybrid waits for a step. ``stale``
    is whether the weights have changed since they were last published.
    """

    def __init__(
        self,
        token: str,
        description: Mapping[str, Any],
        *,
        source: Callable[[], Mapping[str, Tensor]] | None = None,
        host: str = "127.0.0.1",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._description, self._timeout_s = dict(description), timeout_s
        self.stale = True
        self.quiet = threading.RLock()
        """Held while weights change or are copied."""
        self._hurry = threading.Event()  # a step begins: a copy between steps stops
        self._source = source
        self._changed = threading.Condition()
        self._hybrids: list[_Hybrid] = []
        self._working: list[_Hybrid | None] = []  # by slice; None if no hybrid got the slice
        self._ticket = self._version = 0
        self._weights: dict[str, Tensor] | None = None
        self._traffic = dict.fromkeys(_TRAFFIC, 0.0)
        self._closed = False
        self._server = Server(self._serve, secret=token, purpose=PURPOSE, host=host, silence_s=None)

    @property
    def address(self) -> tuple[str, int]:
        return self._server.address

    # ---------------------------------------------------------------- called by the training thread

    @property
    def connected(self) -> bool:
        with self._changed:
            return bool(self._hybrids)

    def counts(self) -> tuple[int, int]:
        """Number of hybrids that can be given a slice, and of hybrids without weights."""
        with self._changed:
            return len(self._members()), sum(not hybrid.has_state for hybrid in self._hybrids)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within this context, no weights are copied; a copy in progress stops."""
        started = time.perf_counter()
        self._hurry.set()
        with self.quiet:
            self._hurry.clear()
            self._traffic["hybrid_blocked_s"] += time.perf_counter() - started
            yield

    def publish(self, weights: Mapping[str, Tensor], *, gives_way: bool = False) -> None:
        """Copy weights into host memory and announce them to every hybrid, which then pulls them.
        With ``gives_way``, stop if a step is about to begin, which will publish its result."""
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

    def collect(self) -> list[Message | None]:
        """Wait for the contributions, in the order of `assign`; None if a slice is lost. A
        contribution has undivided sums by parameter in ``tensors``, and ``weight_sum`` and a
        tally's ``sums`` and ``maxima`` in ``fields``."""
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
        """Bytes and seconds since the last call, by field of `StepReport`."""
        with self._changed:
            found, self._traffic = self._traffic, dict.fromkeys(_TRAFFIC, 0.0)
            return found

    def wait_for(self, num_hybrids: int, timeout_s: float | None = None, *, joining: bool = False) -> bool:
        """Wait until this many hybrids have weights (or connected); False after ``timeout_s``."""
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
            self._lost(hybrid, fault)
        finally:
            with self._changed:
                self._drop(hybrid)

    def _lost(self, hybrid: _Hybrid, fault: TransferError) -> None:
        log = logger.info if hybrid.leaving or hybrid.gone or self._closed else logger.warning
        log("hybrid %s has left: %s", hybrid.name, fault)
        with self._changed:
            self._drop(hybrid)

    def _offer_between_steps(self) -> None:
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
                    hybrid.result, hybrid.ticket = message, None
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
                self._lost(hybrid, fault)
                return
            with self._changed:
                self._traffic["hybrid_sent_bytes"] += num_bytes


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {str(theirs.get(name))[:200]} there and {str(ours.get(name))[:200]} in the core"
    return None
