"""How many tokens a trajectory has still to generate: the posterior of the remaining length."""

from __future__ import annotations

from libra.policy.posterior.columns import SIGNALS
from libra.policy.posterior.competitors import FORECASTERS, GlobalMean, LengthPredictor, OraclePosterior, TurnIndex
from libra.policy.posterior.config import PosteriorConfig
from libra.policy.posterior.forecaster import Posterior
from libra.policy.posterior.paper_tree import PaperTree

__all__ = [
    "FORECASTERS",
    "SIGNALS",
    "GlobalMean",
    "LengthPredictor",
    "OraclePosterior",
    "PaperTree",
    "Posterior",
    "PosteriorConfig",
    "TurnIndex",
]
