"""Libra's plugins in the Dask scheduler: parked tasks and their order, gates, gangs, roles."""

from __future__ import annotations

from libra.scheduler.plugin import LibraPlugin
from libra.scheduler.run_state import RunRegistration

__all__ = ["LibraPlugin", "RunRegistration"]
