"""The workers as the dispatcher and the orderings see them, kept equal to the scheduler's and to their engines'
declarations.

Invariants
1. A worker is reported as joined before anything is placed on it, and as left before it joins again.
2. One that joins during runs is reported when its setup for each of them has ended: until then no task would begin there.
3. The policy has an engine's last declaration, or one that is close enough to it (`UPDATE_FRAC`). Engines of a bucket count as
   equally fast unless they differ by more than their errors (`libra.policy.declared_capacity.as_its_bucket`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libra.facts import EngineDeclared, WorkerCapacity, WorkerWithdrawn, fields_of
from libra.policy.declared_capacity import as_its_bucket, joined_of, off_by_frac
from libra.scheduler import dask_internals
from libra.types import EngineCapacity, Phase

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

UPDATE_FRAC = 0.25
"""An engine's seconds are reported again when they differ by this share from the last report."""


@dataclass(slots=True)
class _Declared:
    """What an engine declares; ``reported`` is the declaration that the policy has, None before."""

    bucket: str
    capacity: EngineCapacity
    reported: EngineCapacity | None = None


class Workers:
    """Workers by name; `changes` returns what is new."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.known: dict[str, WorkerCapacity] = {}
        self.address: dict[str, str] = {}
        self._declared: dict[str, _Declared] = {}

    def declared(self, fact: EngineDeclared) -> None:
        """An engine has declared its capacity."""
        before = self._declared.get(fact.worker)
        reported = before.reported if before is not None and before.bucket == fact.bucket else None
        self._declared[fact.worker] = _Declared(fact.bucket, EngineCapacity.from_declaration(fields_of(fact)), reported)

    def changes(self, silent: Collection[str], joining: Collection[str]) -> Iterator[WorkerCapacity | WorkerWithdrawn]:
        """Changes since the last call, in the order in which to report them.

        ``silent`` are addresses of workers that must generate nothing: their engine sleeps, or failed the version check for one
        run, whose cause may concern other runs too. ``joining`` are addresses of workers whose setup has not ended.
        """
        supply = {
            phase: {a: n for a, n in dask_internals.supply(self._scheduler, phase).items() if a not in joining}
            for phase in Phase
        }
        supply[Phase.ROLLOUT] = {a: 0 if a in silent else n for a, n in supply[Phase.ROLLOUT].items()}
        present = {
            dask_internals.worker_name(self._scheduler, address): address
            for address in {**supply[Phase.ROLLOUT], **supply[Phase.TOOL]}
        }
        for name in [name for name, address in self.address.items() if present.get(name) != address]:
            yield self._gone(name)
        for name, address in present.items():
            slots = supply[Phase.ROLLOUT].get(address, 0), supply[Phase.TOOL].get(address, 0)
            known, declared = self.known.get(name), self._declared.get(name)
            same_slots = known is not None and (known.rollout_slots, known.tool_slots) == slots
            if same_slots and (declared is None or not self._differs(declared)):
                continue
            if declared is None:
                bucket = dask_internals.bucket(self._scheduler, address)
                joined = WorkerCapacity(name, bucket, rollout_slots=slots[0], tool_slots=slots[1])
            else:
                declared.reported = self._as_its_bucket(declared)
                joined = joined_of(
                    name, declared.bucket, declared.reported, rollout_slots=slots[0], tool_slots=slots[1]
                )
            self.known[name], self.address[name] = joined, address
            yield joined

    def left(self, address: str) -> Iterator[WorkerWithdrawn]:
        """A worker has died, or was removed."""
        for name in [name for name, at in self.address.items() if at == address]:
            yield self._gone(name)

    def _gone(self, name: str) -> WorkerWithdrawn:
        """Forget a worker; its next process declares itself again."""
        del self.known[name], self.address[name]
        self._declared.pop(name, None)
        return WorkerWithdrawn(name)

    def _differs(self, declared: _Declared) -> bool:
        """Whether an engine differs noticeably from what was reported of it."""
        return declared.reported is None or off_by_frac(self._as_its_bucket(declared), declared.reported) > UPDATE_FRAC

    def _as_its_bucket(self, declared: _Declared) -> EngineCapacity:
        """Its declaration, beside those of the other engines of its bucket."""
        alike = [other.capacity.steps for other in self._declared.values() if other.bucket == declared.bucket]
        return as_its_bucket(declared.capacity, [steps for steps in alike if steps is not None])
