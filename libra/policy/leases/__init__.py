"""Leases: one table for what the actions of all trajectories take of tool workers and of quotas (ARL-Tangram, 3.2)."""

from __future__ import annotations

from libra.policy.leases.elastic import SpeedUp
from libra.policy.leases.resources import KINDS, Lease, LeaseRequest, Quota, Resources, Revoke, described, read_quota
from libra.policy.leases.table import LeaseTable

__all__ = [
    "KINDS", "Lease", "LeaseRequest", "LeaseTable", "Quota", "Resources", "Revoke", "SpeedUp", "described", "read_quota",
]  # fmt: skip
