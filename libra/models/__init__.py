"""Models that can be made ready for a run without a model hub."""

from __future__ import annotations

from libra.models.prepare import Prepared, prepare

__all__ = ["Prepared", "prepare"]
