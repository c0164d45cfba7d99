"""Leases of tool workers and quotas, in one table for all actions (ARL-Tangram, 3.2)."""
