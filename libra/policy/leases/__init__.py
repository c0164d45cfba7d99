"""Leases: one table for what the actions of all trajectories take of tool workers and of quotas (ARL-Tangram, 3.2)."""
