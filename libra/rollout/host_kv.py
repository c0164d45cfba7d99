"""KV objects of an engine in host memory: contexts that its own cache evicted, and those that are sent to other engines.

Invariants
1. The objects never take more than ``limit_bytes`` together; one that does not fit alone is not kept.
2. A trajectory has at most one object, the last one that was put.
3. The least valuable is evicted first: of older weights, then of a trajectory that waits for nothing here, then the one that
   was put or read longest ago.
4. Any thread may call any method.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Container

from libra.rollout.kv_object import KVObject


class HostKV:
    """The pool of one engine; ``evicted`` counts the objects that gave way to others."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = self.evicted = 0
        self._objects: OrderedDict[str, KVObject] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._objects)

    def put(self, kv: KVObject, waiting: Container[str] = ()) -> bool:
        """Keep an object, in place of the less valuable ones; False if it is larger than the pool. ``waiting``:
        trajectories that have requests here."""
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
        """The object of a trajectory; it stays."""
        with self._lock:
            found = self._objects.get(trajectory_id)
            if found is not None:
                self._objects.move_to_end(trajectory_id)
            return found

    def drop(self, trajectory_id: str) -> None:
        """Forget the object of a trajectory, if there is one."""
        with self._lock:
            self._drop(trajectory_id)

    def drop_before(self, version: int) -> None:
        """Forget what older weights computed."""
        with self._lock:
            for name in [name for name, kv in self._objects.items() if kv.version < version]:
                self._drop(name)

    def _drop(self, trajectory_id: str) -> None:
        found = self._objects.pop(trajectory_id, None)
        if found is not None:
            self.used_bytes -= found.num_bytes
