"""The system in virtual time, under the same policy objects as the live one: discrete events, seeded, no clock."""

from __future__ import annotations

from libra.hardware.virtual_engine import EngineTables, VirtualEngine
from libra.sim.engines import EngineSpec, fleet, slots_of, typical_context
from libra.sim.simulation_options import Loss, SimulationOptions
from libra.sim.simulation_result import Dispatched, SimulationResult
from libra.sim.simulator import Simulator
from libra.sim.workload import TrajectoryPlan, TurnPlan, Workload, draw, load_workload, synthetic

__all__ = [
    "Dispatched",
    "EngineSpec",
    "EngineTables",
    "Loss",
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
    "synthetic",
    "typical_context",
]
