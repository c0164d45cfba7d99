"""Orders and placements of other systems that are simulated alone."""

from __future__ import annotations

import json
from collections.abc import Callable

from libra.sim import EngineSpec, Simulator, Workload
from libra.sim.dealt_groups import DealtGroups, apart
from libra.sim.seer_order import SeerOrder

Engines = Callable[..., tuple[EngineSpec, ...]]
Workloads = Callable[..., Workload]


def test_whole_groups_are_dealt_in_turn_and_stay(engines: Engines, workload: Workloads) -> None:
    work = workload(*([(50, 0.0)] for _ in range(6)), group_size=2)
    specs = apart(engines(2), 6)
    simulator = Simulator(work, specs, DealtGroups([spec.name for spec in specs]))
    simulator.run()
    places = [(each.key.split("-")[3], each.worker, each.at_s) for each in simulator.record.dispatched]
    assert places == [(str(group), f"tp1-{group % 2}", 0.0) for group in (0, 0, 1, 1, 2, 2)]


def test_seers_order_has_probes_first_and_then_the_longest_groups(engines: Engines, workload: Workloads) -> None:
    lengths = (40, 41, 42, 200, 210, 220)
    work = workload(*([(tokens, 0.0)] for tokens in lengths), group_size=3)
    simulator = Simulator(work, engines(1, slots=1), SeerOrder())
    simulator.run()
    order = [tuple(each.key.split("-")[3:5]) for each in simulator.record.dispatched]
    # The first comes alone; the other probe is before the rest; then the longer group.
    assert order == [("0", "0"), ("1", "0"), ("1", "1"), ("1", "2"), ("0", "1"), ("0", "2")]
    again, kept = SeerOrder(), json.loads(json.dumps(simulator._ordering.snapshot()))
    again.restore(kept)
    assert again.snapshot() == kept
