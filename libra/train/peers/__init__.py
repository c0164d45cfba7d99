"""Other libraries' functions expressed with ours: the options with which Libra reproduces their numbers, as executable
code.

Each function takes the arguments of its peer under the peer's names and calls Libra's functions with what makes them agree;
docs/golden.md lists them, tests/train/test_golden.py runs them on recorded cases. Nothing in a run uses this package.
"""

from __future__ import annotations

from libra.train.peers.areal import areal_ppo_actor_loss, areal_rejection, areal_sapo_loss
from libra.train.peers.trl import trl_grpo_loss, trl_sampling_weights
from libra.train.peers.verl import (
    verl_advantages,
    verl_agg_loss,
    verl_kl_penalty,
    verl_policy_loss,
    verl_rejection_mask,
    verl_rollout_weights,
    verl_value_loss,
)

__all__ = [
    "areal_ppo_actor_loss",
    "areal_rejection",
    "areal_sapo_loss",
    "trl_grpo_loss",
    "trl_sampling_weights",
    "verl_advantages",
    "verl_agg_loss",
    "verl_kl_penalty",
    "verl_policy_loss",
    "verl_rejection_mask",
    "verl_rollout_weights",
    "verl_value_loss",
]
