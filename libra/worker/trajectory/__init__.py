"""The trajectories of a worker: their quanta, records, tool calls, agents and grades."""
