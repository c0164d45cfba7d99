"""The KV of trajectories between two turns: as objects, in host memory, and in an engine's slots.

1. An object names the trajectory, its weights, and its tokens by number and digest.
2. `KVObject.check` allows its use by an engine with the same weights and layout, for a context that
   starts with these tokens.
3. `KVObject.received` accepts only the bytes that were exported: size and checksum must be right.
4. A pool never holds more than ``limit_bytes``, and at most one object per trajectory. It evicts
   objects of older weights first, then of trajectories without a request here, then the least
   recently used object.
5. Only slots without a running request are read. A slot is filled only beyond its own tokens, and
   the object then leaves the pool.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import zlib
from collections import OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.errors import KVRefused
from libra.rollout.attention import SlotKV
from libra.rollout.slot_table import RETAINED, Job, SlotTable


def digest_of(token_ids: NDArray[Any]) -> str:
    """Name of a sequence of tokens: 128 bits of SHA-256, in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(token_ids, np.int64).tobytes()).hexdigest()[:32]


_HEADER = {"trajectory_id": str, "version": int, "num_tokens": int, "digest": str, "layout": str, "crc32": int}


@dataclass(frozen=True, slots=True)
class KVObject:
    """Keys and values of a trajectory's first ``num_tokens`` tokens, all layers and KV heads."""

    trajectory_id: str
    version: int  # of the weights that computed the KV; the oldest of several
    num_tokens: int
    digest: str  # `digest_of` its tokens
    layout: str  # equal layouts store the same numbers in the same order at any TP degree
    crc32: int  # of ``data``
    data: NDArray[np.uint8]  # (n,) bytes

    @classmethod
    def of(
        cls, trajectory_id: str, version: int, token_ids: NDArray[Any], layout: str, data: NDArray[np.uint8]
    ) -> KVObject:
        """The KV of exactly these tokens (n,)."""
        return cls(trajectory_id, version, len(token_ids), digest_of(token_ids), layout, zlib.crc32(data.data), data)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def header(self) -> dict[str, Any]:
        """All but the data, as JSON-able fields for `received`."""
        return {name: getattr(self, name) for name in (*_HEADER, "num_bytes")}

    @classmethod
    def received(cls, header: Mapping[str, Any], data: NDArray[np.uint8]) -> KVObject:
        """The object of a header and received bytes; KVRefused if the bytes are damaged."""
        try:
            found = cls(data=data, **{name: kind(header[name]) for name, kind in _HEADER.items()})
            num_bytes = int(header["num_bytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise KVRefused(f"KV object: its header is malformed: {error!r}; its context is computed again") from error
        if data.nbytes != num_bytes:
            raise KVRefused(
                f"KV of {found.trajectory_id}: {data.nbytes} bytes arrived of {num_bytes}; its context is computed again"
            )
        if (crc32 := zlib.crc32(data.data)) != found.crc32:
            raise KVRefused(
                f"KV of {found.trajectory_id}: the checksum of its {num_bytes} bytes is {crc32:#010x}, it was exported with "
                f"{found.crc32:#010x}; its context is computed again"
            )
        return found

    def check(self, version: int, layout: str, context_ids: NDArray[Any]) -> None:
        """KVRefused unless an engine with these weights and layout may use it for this context."""
        for what, own, wanted in (("weights of version", self.version, version), ("layout", self.layout, layout)):
            if own != wanted:
                raise KVRefused(f"KV of {self.trajectory_id}: it has {what} {own}, and the engine has {wanted}")
        if len(context_ids) < self.num_tokens or digest_of(context_ids[: self.num_tokens]) != self.digest:
            raise KVRefused(
                f"KV of {self.trajectory_id}: its {self.num_tokens} tokens are not the beginning of the context of "
                f"{len(context_ids)} tokens"
            )


class HostKV:
    """The pool of one engine; ``evicted`` counts objects replaced by others."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = self.evicted = 0
        self._objects: OrderedDict[str, KVObject] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._objects)

    def put(self, kv: KVObject, waiting: Container[str] = ()) -> bool:
        """Keep an object, replacing less valuable objects; False if it is larger than the pool.
        ``waiting`` has the trajectories with requests here."""
        with self._lock:
            self._drop(kv.trajectory_id)
            if kv.num_bytes > self.limit_bytes:
                return False
            if self.used_bytes + kv.num_bytes > self.limit_bytes:
                place = {name: index for index, name in enumerate(self._objects)}
                order = sorted(place, key=lambda name: (self._objects[name].version, name in waiting, place[name]))
                for name in order:
                    self._drop(name)
                    self.evicted += 1
                    if self.used_bytes + kv.num_bytes <= self.limit_bytes:
                        break
            self._objects[kv.trajectory_id] = kv
            self.used_bytes += kv.num_bytes
            return True

    def get(self, trajectory_id: str) -> KVObject | None:
        """The object of a trajectory, which stays in the pool."""
        with self._lock:
            found = self._objects.get(trajectory_id)
            if found is not None:
                self._objects.move_to_end(trajectory_id)
            return found

    def drop(self, trajectory_id: str) -> None:
        with self._lock:
            self._drop(trajectory_id)

    def drop_before(self, version: int) -> None:
        """Drop objects of older weights."""
        with self._lock:
            for name in [name for name, kv in self._objects.items() if kv.version < version]:
                self._drop(name)

    def _drop(self, trajectory_id: str) -> None:
        found = self._objects.pop(trajectory_id, None)
        if found is not None:
            self.used_bytes -= found.num_bytes


logger = logging.getLogger(__name__)


class ParkedKV:
    """One engine's KV moves, on its thread. Without a ``pool`` every method does nothing."""

    def __init__(self, kv: SlotKV, table: SlotTable, pool: HostKV | None) -> None:
        self.kv, self.table, self.pool = kv, table, pool

    def evicted(self, slot: int, version: int, waiting: Container[str]) -> None:
        """Save a retained slot, computed by weights ``version``, that is about to be freed."""
        if self.pool is not None and self.table.cached[slot]:
            self.pool.put(self._read(slot, version), waiting)

    def export(self, trajectory_id: str, version: int, waiting: Container[str]) -> KVObject | None:
        """The KV of a trajectory, now in the pool; None without KV or room, or while it runs."""
        slot = self.table.slot_of.get(trajectory_id)
        if self.pool is None or slot is None:
            return None if self.pool is None else self.pool.get(trajectory_id)
        if self.table.state[slot] != RETAINED or not self.table.cached[slot]:
            return None
        found = self._read(slot, version)
        return found if self.pool.put(found, waiting) else None

    def restore(self, job: Job, version: int) -> int:
        """Fill a starting request's slot from the pool if that has more; returns cached tokens."""
        slot, context = job.slot, job.request.context_ids
        reuse = int(self.table.cached[slot])
        kv = None if self.pool is None else self.pool.get(job.name)
        if self.pool is None or kv is None:
            return reuse
        self.pool.drop(job.name)
        tokens = min(kv.num_tokens, len(context) - 1)  # the last token must be fed to give logits
        try:
            kv.check(version, self.kv.layout, context)
        except KVRefused as error:
            logger.info("%s; it is computed again", error)
            return reuse
        if tokens > reuse:
            self.kv.write(slot, tokens, kv.data, kv.num_tokens)
            self.table.cached[slot] = reuse = tokens
        return reuse

    def forget(self, trajectory_id: str) -> None:
        """Drop the KV of a trajectory that has ended or was aborted."""
        if self.pool is not None:
            self.pool.drop(trajectory_id)

    def loaded(self, version: int) -> None:
        """Drop the KV of weights older than ``version``."""
        if self.pool is not None:
            self.pool.drop_before(version)

    def _read(self, slot: int, version: int) -> KVObject:
        cached = int(self.table.cached[slot])
        tokens, data = self.table.tokens[slot, :cached], self.kv.read(slot, cached)
        return KVObject.of(self.table.owner[slot], version, tokens, self.kv.layout, data)
