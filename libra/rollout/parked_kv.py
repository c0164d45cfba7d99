"""KV of trajectories between two turns: from the slots of an engine into its host pool, and back.

Invariants
1. Only the slot of a trajectory without a running request is read.
2. A slot is filled only from an object that `KVObject.check` allows for its request, and only beyond what the slot has.
3. An object leaves the pool when its trajectory's next request starts: from then on the slot has it, or nobody needs it.
"""

from __future__ import annotations

import logging
from collections.abc import Container

from libra.errors import KVRefused
from libra.rollout.host_kv import HostKV
from libra.rollout.kv_object import KVObject
from libra.rollout.kv_slots import SlotKV
from libra.rollout.slot_table import RETAINED, Job, SlotTable

logger = logging.getLogger(__name__)


class ParkedKV:
    """Of one engine; on its thread. Without a ``pool`` nothing is kept, and every method does nothing."""

    def __init__(self, kv: SlotKV, table: SlotTable, pool: HostKV | None) -> None:
        self.kv, self.table, self.pool = kv, table, pool

    def evicted(self, slot: int, version: int, waiting: Container[str]) -> None:
        """A retained slot, computed by weights ``version``, is about to be freed; ``waiting``: trajectories with requests."""
        if self.pool is not None and self.table.cached[slot]:
            self.pool.put(self._read(slot, version), waiting)

    def export(self, trajectory_id: str, version: int, waiting: Container[str]) -> KVObject | None:
        """The KV of a trajectory, which the pool has from now on; None if there is none, no room for it, or a request runs."""
        slot = self.table.slot_of.get(trajectory_id)
        if self.pool is None or slot is None:
            return None if self.pool is None else self.pool.get(trajectory_id)
        if self.table.state[slot] != RETAINED or not self.table.cached[slot]:
            return None
        found = self._read(slot, version)
        return found if self.pool.put(found, waiting) else None

    def restore(self, job: Job, version: int) -> int:
        """A request starts: fill its slot from the pool, if that has more of its context than the slot; returns the tokens
        whose KV the slot has now."""
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
        """A trajectory has ended, or was aborted."""
        if self.pool is not None:
            self.pool.drop(trajectory_id)

    def loaded(self, version: int) -> None:
        """The engine serves these weights from now on."""
        if self.pool is not None:
            self.pool.drop_before(version)

    def _read(self, slot: int, version: int) -> KVObject:
        cached = int(self.table.cached[slot])
        tokens, data = self.table.tokens[slot, :cached], self.kv.read(slot, cached)
        return KVObject.of(self.table.owner[slot], version, tokens, self.kv.layout, data)
