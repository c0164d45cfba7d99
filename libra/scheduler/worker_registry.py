"""Which workers the dispatcher and the orderings know, kept equal to what the scheduler knows, and to what their engines declare.

Invariants
1. A worker is told of as joined before anything is placed on it, and as left before it joins again.
2. One that joins while runs go on is told of once its part of each of them is set up: until then nothing that it were given
   would begin, and others can.
3. What is told of an engine is what it declared last, or so near to it that nobody would decide otherwise (`RETOLD_FRAC`). One
   that has not measured its own passes yet counts as fast as one of its bucket that has; where there is none, nothing is told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from libra.events import EngineDeclared
from libra.events.event import Event
from libra.policy import WorkerJoined, WorkerLeft, joined_of, off_by_frac
from libra.scheduler import dask_internals
from libra.types import EngineCapacity, Phase

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from libra.scheduler.run_state import RunState

RETOLD_FRAC = 0.25
"""An engine's seconds are told anew when they are off by so much of what was told last."""
_FIELDS = frozenset(f.name for f in fields(EngineDeclared)) - {f.name for f in fields(Event)} - {"worker"}


@dataclass(slots=True)
class _Declared:
    """What an engine says of itself; ``told`` is the declaration that the policy was last told, None before."""

    bucket: str
    capacity: EngineCapacity
    told: EngineCapacity | None = None


class Workers:
    """By name; `changes` says what is new."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.told: dict[str, WorkerJoined] = {}
        self.address: dict[str, str] = {}
        self._declared: dict[str, _Declared] = {}

    def declared(self, state: RunState, msg: dict[str, Any]) -> None:
        """An engine says what it is; the log has it before anybody acts on it."""
        fields = {name: value for name, value in msg.items() if name in _FIELDS}
        state.emit("engine_declared", worker=msg["name"], **fields)
        before = self._declared.get(msg["name"])
        told = before.told if before is not None and before.bucket == msg["bucket"] else None
        self._declared[msg["name"]] = _Declared(msg["bucket"], EngineCapacity.from_declaration(msg), told)

    def changes(self, silent: Collection[str], joining: Collection[str]) -> Iterator[WorkerJoined | WorkerLeft]:
        """What has changed since the last call, to be told at once, in this order.

        ``silent`` are addresses of workers that are to generate nothing: their engine sleeps, or one of one run there does not
        hold the weights it should, and what made it so may have struck those of other runs. ``joining`` are addresses of those
        that set up an engine or an environment.
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
            told, declared = self.told.get(name), self._declared.get(name)
            as_told = told is not None and (told.rollout_slots, told.tool_slots) == slots
            if as_told and (declared is None or not self._differs(declared)):
                continue
            if declared is None:
                bucket = dask_internals.bucket(self._scheduler, address)
                joined = WorkerJoined(name, bucket, rollout_slots=slots[0], tool_slots=slots[1])
            else:
                declared.told = self._as_its_bucket(declared)
                joined = joined_of(name, declared.bucket, declared.told, rollout_slots=slots[0], tool_slots=slots[1])
            self.told[name], self.address[name] = joined, address
            yield joined

    def left(self, address: str) -> Iterator[WorkerLeft]:
        """A worker has died, or was removed."""
        for name in [name for name, at in self.address.items() if at == address]:
            yield self._gone(name)

    def _gone(self, name: str) -> WorkerLeft:
        """It is not there; what its next process holds, that will say."""
        del self.told[name], self.address[name]
        self._declared.pop(name, None)
        return WorkerLeft(name)

    def _differs(self, declared: _Declared) -> bool:
        """Whether an engine is noticeably not what was told of it."""
        return declared.told is None or off_by_frac(self._as_its_bucket(declared), declared.told) > RETOLD_FRAC

    def _as_its_bucket(self, declared: _Declared) -> EngineCapacity:
        """What it declares, with the seconds of the first of its bucket that has measured some, where it has not itself."""
        if declared.capacity.steps is not None:
            return declared.capacity
        alike = (other.capacity.steps for other in self._declared.values() if other.bucket == declared.bucket)
        return replace(declared.capacity, steps=next((steps for steps in alike if steps is not None), None))
