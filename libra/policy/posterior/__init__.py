"""How many tokens a trajectory has still to generate: the posterior of the remaining length."""

from __future__ import annotations

from libra.policy.posterior.columns import SIGNALS
from libra.policy.posterior.dials import Dials
from libra.policy.posterior.forecaster import Posterior

__all__ = ["SIGNALS", "Dials", "Posterior"]
