"""The part of Libra that lives in the Dask scheduler: parked tasks, their order, and the gates of a run."""

from __future__ import annotations

from libra.scheduler.plugin import LibraPlugin

__all__ = ["LibraPlugin"]
