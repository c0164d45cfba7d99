"""The engines of a simulation: tensor-parallel degree, slots, seconds, and the events that the policy receives about
each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from libra.errors import ConfigError
from libra.facts import WorkerCapacity
from libra.hardware.virtual_engine import EngineTables
from libra.policy import joined_of
from libra.sim.workload import TrajectoryPlan

MAX_SLOTS = 256
"""Maximum concurrent generations of an engine, as inference engines are usually configured."""


class QuantumOverhead(NamedTuple):
    """Seconds of a quantum outside engine and tool, during which its trajectory holds a slot; one sample of each is drawn.

    Attributes
    ----------
    transport_s : tuple of float
        From dispatch to the start on the worker, and from its end to the scheduler's receipt of the report.
    worker_s : tuple of float
        On the worker, around the engine or the tool: waiting for a pass to end, text to tokens and back, writing the record.
    """

    transport_s: tuple[float, ...] = (0.0,)
    worker_s: tuple[float, ...] = (0.0,)


NO_OVERHEAD = QuantumOverhead()
"""Only engines and tools take time."""


class EngineSpec(NamedTuple):
    """One engine of a simulation.

    ``bucket_name`` is its capacity class, empty: engines of one degree. ``announced`` are the events that the policy
    receives about it, each with the seconds after the first gate (the first one at once); empty: its tables, from the
    beginning.
    """

    name: str
    tp: int
    slots: int
    tables: EngineTables
    bucket_name: str = ""
    overhead: QuantumOverhead = NO_OVERHEAD
    announced: tuple[tuple[float, WorkerCapacity], ...] = ()

    @property
    def bucket(self) -> str:
        """Its capacity class."""
        return self.bucket_name or f"tp{self.tp}"

    def joined(self, context_tokens: int) -> WorkerCapacity:
        """The first event about it that the policy receives; without ``announced``, from its tables at contexts of this
        many tokens."""
        if self.announced:
            return self.announced[0][1]
        return joined_of(self.name, self.bucket, self.tables.capacity(self.slots, context_tokens))


def typical_context(plans: Iterable[TrajectoryPlan]) -> int:
    """Mean context at the beginning of a turn, over the turns of ``plans``; 1 without a turn."""
    turns = total = 0
    for plan in plans:
        context = plan.prompt_tokens
        for turn in plan.turns:
            turns += 1
            total += context
            context += turn.new_tokens + turn.payload_tokens
    return total // turns if turns else 1


def slots_of(tables: EngineTables, context_tokens: int) -> int:
    """Concurrent generations such that contexts of this size fit into the KV memory; at least 1, at most `MAX_SLOTS`."""
    return max(1, min(MAX_SLOTS, tables.kv_capacity_tokens // max(1, context_tokens)))


def fleet(
    layout: Mapping[int, int], tables: Mapping[int, EngineTables], slots: Mapping[int, int]
) -> tuple[EngineSpec, ...]:
    """Engines of a layout (engines by degree); ConfigError if it has none, or a degree has no seconds."""
    missing = sorted(tp for tp, count in layout.items() if count > 0 and tp not in tables)
    if missing or not any(count > 0 for count in layout.values()):
        raise ConfigError(f"layout {dict(layout)}: degrees {missing or 'none'}; seconds are known for {sorted(tables)}")
    return tuple(
        EngineSpec(f"tp{tp}-{index}", tp, slots[tp], tables[tp]) for tp in sorted(layout) for index in range(layout[tp])
    )
