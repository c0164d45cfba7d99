"""A connection between two replicas: messages of a few JSON fields and raw tensors over
`libra.transport`.

Each message is a frame ``{"kind": ..., "tensors": [[name, dtype, shape], ...], "fields": {...}}``
and the bytes of those tensors. A slice of a minibatch is sent as flat tensors.

Invariants
----------
1. A tensor is the bytes of its elements, of one of `DTYPES`, sent from and received into its own
   memory. The frame is authenticated; elements are not, as in torch.distributed. Encrypt an
   untrusted network.
2. A message is received whole or not at all; a broken connection is a TransferError.
3. `from_tensors` returns the slice given to `to_tensors`, bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libra.errors import TransferError, TransportError
from libra.train.samples import Sample
from libra.transport import Address, Channel
from libra.transport import connect as connect_channel
from libra.types import Taught

PURPOSE = "hybrid replicas"
_TAUGHT, _FACTS = "taught", "facts"
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "bool", "uint8")
}


@dataclass(frozen=True, slots=True)
class Message:
    """A received message: ``num_bytes`` is the size of its frame and elements."""

    kind: str
    fields: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    num_bytes: int = 0


class Wire:
    """One end of a connection between replicas. Several threads may send, each a whole message; one
    receives."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()

    def send(
        self, kind: str, fields: Mapping[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> int:
        """Send one message; returns the bytes of its frame and elements. TransferError if the peer has
        disconnected."""
        plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in (tensors or {}).items()}
        described = [[name, _dtype_name(name, tensor), list(tensor.shape)] for name, tensor in plain.items()]
        views = [_bytes_of(tensor) for tensor in plain.values()]
        with _as_transfer_error(f"sending {kind!r} failed"), self._sending:
            before = self._channel.sent_bytes
            self._channel.send_frame(kind=kind, tensors=described, fields=dict(fields or {}))
            self._channel.send_bytes(views)
            return self._channel.sent_bytes - before

    def receive(self) -> Message:
        """The next message. TransferError if the connection ends, or its content is not a message."""
        with _as_transfer_error("receiving failed"):
            before = self._channel.received_bytes
            frame = self._channel.recv_frame()
            if frame is None:
                raise TransferError("wire: the other end is gone")
            tensors = {name: _empty(name, dtype, shape) for name, dtype, shape in frame["tensors"]}
            self._channel.recv_bytes([_bytes_of(tensor) for tensor in tensors.values()])
            return Message(frame["kind"], frame["fields"], tensors, self._channel.received_bytes - before)

    def close(self) -> None:
        """End the connection; a thread that waits in `receive` at either end gets a TransferError."""
        self._channel.close()


def connect(address: Address, token: str) -> Wire:
    """A wire to the server at ``address``; TransferError if none answers or it does not know ``token``."""
    with _as_transfer_error("no handshake with the core"):
        return Wire(connect_channel(address, token, purpose=PURPOSE, silence_s=None))


@contextlib.contextmanager
def _as_transfer_error(what: str) -> Iterator[None]:
    try:
        yield
    except TransferError:
        raise
    except (TransportError, LookupError, TypeError, ValueError) as error:
        raise TransferError(f"wire: {what}: {error}") from error


def _empty(name: str, dtype: str, shape: list[int]) -> Tensor:
    if dtype not in DTYPES:
        raise TransferError(f"wire: tensor {name} is of {dtype!r}; allowed are {', '.join(DTYPES)}")
    try:
        return torch.empty(shape, dtype=DTYPES[dtype])
    except (RuntimeError, TypeError) as error:  # a negative size, or more than there is memory
        raise TransferError(f"wire: tensor {name} of {dtype} and shape {shape} has no room: {error}") from error


def _bytes_of(tensor: Tensor) -> memoryview:
    if not math.prod(tensor.shape):
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _dtype_name(name: str, tensor: Tensor) -> str:
    found = str(tensor.dtype).removeprefix("torch.")
    if found not in DTYPES:
        raise TransferError(f"wire: tensor {name} is of {found}; allowed are {', '.join(DTYPES)}")
    return found


def to_tensors(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """A slice as flat tensors: each array of all samples in order, and their shapes and other fields as
    JSON."""
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
