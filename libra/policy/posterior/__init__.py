"""The posterior of a trajectory's remaining length."""

from __future__ import annotations

from libra.policy.posterior.forecaster import Posterior

__all__ = ["Posterior"]
