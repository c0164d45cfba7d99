"""The system in virtual time, under the same policy objects as the live one: discrete events, seeded, no clock."""

from __future__ import annotations

from libra.hardware.engine_tables import EngineTables
from libra.hardware.virtual_engine import VirtualEngine
from libra.sim.simulation_options import (
    Dispatched,
    EngineSpec,
    SimulationOptions,
    SimulationResult,
    fleet,
    slots_of,
    typical_context,
)
from libra.sim.simulator import Simulator
from libra.sim.workload import TrajectoryPlan, TurnPlan, Workload, draw, load_workload

__all__ = [
    "Dispatched",
    "EngineSpec",
    "EngineTables",
    "SimulationOptions",
    "SimulationResult",
    "Simulator",
    "TrajectoryPlan",
    "TurnPlan",
    "VirtualEngine",
    "Workload",
    "draw",
    "fleet",
    "load_workload",
    "slots_of",
    "typical_context",
]
