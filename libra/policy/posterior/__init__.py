"""How many tokens a trajectory has still to generate: the posterior of the remaining length."""

from __future__ import annotations

from libra.policy.posterior.columns import SIGNALS
from libra.policy.posterior.forecaster import Dials, Posterior

__all__ = ["SIGNALS", "Dials", "Posterior"]
