"""Engines that a simulation has: how many of which tensor-parallel degree, and how much each takes at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from libra.errors import ConfigError
from libra.hardware.virtual_engine import EngineTables
from libra.policy import WorkerJoined, joined_of
from libra.sim.workload import TrajectoryPlan

MAX_SLOTS = 256
"""Most generations that one engine takes at once, as inference engines are usually set."""


class Between(NamedTuple):
    """Seconds of a quantum that no engine and no tool takes: its trajectory holds a slot meanwhile. One of each is drawn.

    Attributes
    ----------
    transport_s : tuple of float
        From the slot being given to the worker's beginning, and from its end to the scheduler's hearing of it.
    worker_s : tuple of float
        On the worker, around the engine or the tool: waiting for a pass to end, text to tokens and back, writing the record.
    """

    transport_s: tuple[float, ...] = (0.0,)
    worker_s: tuple[float, ...] = (0.0,)


NOTHING_BETWEEN = Between()
"""Everything but engines and tools takes no time."""


class EngineSpec(NamedTuple):
    """One engine of a fleet.

    ``bucket_name`` is its capacity class, empty: engines of one degree. ``told`` is what the policy is told of it, each with the
    seconds after the first gate at which it is (the first one at once); empty: its tables, from the beginning.
    """

    name: str
    tp: int
    slots: int
    tables: EngineTables
    bucket_name: str = ""
    between: Between = NOTHING_BETWEEN
    told: tuple[tuple[float, WorkerJoined], ...] = ()

    @property
    def bucket(self) -> str:
        """Its capacity class."""
        return self.bucket_name or f"tp{self.tp}"

    def joined(self, context_tokens: int) -> WorkerJoined:
        """What the policy is told of it first; of its tables at contexts of this many tokens."""
        if self.told:
            return self.told[0][1]
        return joined_of(self.name, self.bucket, self.tables.capacity(self.slots, context_tokens))


def typical_context(plans: Iterable[TrajectoryPlan]) -> int:
    """Context that a turn has on average over the turns of ``plans``: what most seconds are spent at."""
    turns = total = 0
    for plan in plans:
        context = plan.prompt_tokens
        for turn in plan.turns:
            turns += 1
            total += context
            context += turn.new_tokens + turn.payload_tokens
    return total // turns if turns else 1


def slots_of(tables: EngineTables, context_tokens: int) -> int:
    """Generations at once, such that contexts of this size fit into the KV memory; at least 1, at most `MAX_SLOTS`."""
    return max(1, min(MAX_SLOTS, tables.kv_capacity_tokens // max(1, context_tokens)))


def fleet(
    layout: Mapping[int, int], tables: Mapping[int, EngineTables], slots: Mapping[int, int]
) -> tuple[EngineSpec, ...]:
    """Engines of a layout, given as number of engines by degree; ConfigError where it has none, or a degree has no seconds."""
    missing = sorted(tp for tp, count in layout.items() if count > 0 and tp not in tables)
    if missing or not any(count > 0 for count in layout.values()):
        raise ConfigError(f"layout {dict(layout)}: degrees {missing or 'none'}; seconds are known for {sorted(tables)}")
    return tuple(
        EngineSpec(f"tp{tp}-{index}", tp, slots[tp], tables[tp]) for tp in sorted(layout) for index in range(layout[tp])
    )
