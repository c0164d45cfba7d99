"""Recorded agents: their files, read once for planner, simulator, environments and benchmarks."""
