"""Training algorithms by name: the settings that each paper's defaults amount to.

An algorithm is a preset: ``trainer.algorithm`` fills every key of ``trainer`` that is a field of `Preset` and was not
given; a key that is given wins. docs/algorithms.md is made from this table (``python -m libra.config.algorithms``).
"""

from __future__ import annotations

from typing import Literal

AdvantageName = Literal["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "opo"]
LossName = Literal["ppo", "gspo", "cispo", "sapo", "gmpo", "dppo", "reinforce"]
AggregationMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "constant"
]
KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]
