"""Which workers the dispatcher and the orderings know, kept equal to what the scheduler knows; and how fast they turned out.

Invariants
1. A worker is told of as joined before anything is placed on it, and as left before it joins again.
2. One that joins while runs go on is told of once its part of each of them is set up: until then nothing that it were given
   would begin, and others can.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from libra.policy import WorkerJoined, WorkerLeft
from libra.scheduler import private
from libra.types import Phase

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

FORGETTING = 0.02
"""Weight of the newest generation in a worker's measured speed."""
RETOLD_FRAC = 0.25
"""A worker's speed is told anew when it is off by so much of what was told last."""
MEASURED_AFTER = 32
"""Generations before a speed is told for the first time."""


class Speed:
    """Seconds per token of generations on one worker, against how many ran there at once: a line with forgetting."""

    def __init__(self) -> None:
        self.count = 0
        self._n = self._y = self._nn = self._ny = 0.0

    def add(self, running: int, token_s: float) -> None:
        """A generation ended that took so long per token, while so many ran."""
        self.count += 1
        weight = max(FORGETTING, 1.0 / self.count)
        self._n += weight * (running - self._n)
        self._y += weight * (token_s - self._y)
        self._nn += weight * (running * running - self._nn)
        self._ny += weight * (running * token_s - self._ny)

    def at(self, running: int) -> float:
        """Seconds per token with so many at once, never below 0 slope: more company makes nobody faster."""
        spread = self._nn - self._n * self._n
        slope = max(0.0, (self._ny - self._n * self._y) / spread) if spread > 1e-9 else 0.0
        return max(self._y + slope * (running - self._n), 0.1 * self._y)


class Workers:
    """By name; `changes` says what is new."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.told: dict[str, WorkerJoined] = {}
        self.address: dict[str, str] = {}
        self._speed: dict[str, Speed] = {}
        self._declared: dict[str, WorkerJoined] = {}

    def declare(self, spec: WorkerJoined) -> None:
        """Say what a worker can do, by name; its speed is then not measured. Its slots are what it supplies."""
        self._declared[spec.worker] = spec

    def changes(self, silent: Collection[str], joining: Collection[str]) -> Iterator[WorkerJoined | WorkerLeft]:
        """What has changed since the last call, to be told at once, in this order.

        ``silent`` are addresses of workers that are to generate nothing: their engine sleeps, or one of one run there does not
        hold the weights it should, and what made it so may have struck those of other runs. ``joining`` are addresses of those
        that set up an engine or an environment.
        """
        supply = {
            phase: {a: n for a, n in private.supply(self._scheduler, phase).items() if a not in joining}
            for phase in Phase
        }
        supply[Phase.ROLLOUT] = {a: 0 if a in silent else n for a, n in supply[Phase.ROLLOUT].items()}
        present = {
            private.worker_name(self._scheduler, address): address
            for address in {**supply[Phase.ROLLOUT], **supply[Phase.TOOL]}
        }
        for name in [name for name, address in self.address.items() if present.get(name) != address]:
            del self.told[name], self.address[name]
            self._speed.pop(name, None)
            yield WorkerLeft(name)
        for name, address in present.items():
            slots = supply[Phase.ROLLOUT].get(address, 0), supply[Phase.TOOL].get(address, 0)
            told = self.told.get(name)
            if told is not None and (told.rollout_slots, told.tool_slots) == slots:
                continue
            joined = replace(
                told or self._declared.get(name) or WorkerJoined(name, bucket=private.bucket(self._scheduler, address)),
                rollout_slots=slots[0],
                tool_slots=slots[1],
            )
            self.told[name], self.address[name] = joined, address
            yield joined

    def left(self, address: str) -> Iterator[WorkerLeft]:
        """A worker has died, or was removed."""
        for name in [name for name, at in self.address.items() if at == address]:
            del self.told[name], self.address[name]
            self._speed.pop(name, None)
            yield WorkerLeft(name)

    def generated(self, worker: str, running: int, tokens: int, seconds: float) -> None:
        """A generation ended there."""
        if tokens > 0 and worker in self.told and worker not in self._declared:
            self._speed.setdefault(worker, Speed()).add(max(1, running), seconds / tokens)

    def respeeded(self) -> Iterator[WorkerJoined]:
        """Workers whose measured speed is not what was told of them, with the new one."""
        for name, speed in self._speed.items():
            told = self.told[name]
            if speed.count < MEASURED_AFTER:
                continue
            token_s, full_s = speed.at(1), speed.at(told.rollout_slots)
            if abs(full_s - told.token_full_s) <= RETOLD_FRAC * told.token_full_s:
                continue
            # Computing a token of context costs an engine no more than giving one to everybody in a full batch costs per head.
            prefill_s = full_s / max(1, told.rollout_slots)
            self.told[name] = replace(
                told, token_s=round(token_s, 9), token_full_s=round(full_s, 9), prefill_token_s=round(prefill_s, 9)
            )
            yield self.told[name]
