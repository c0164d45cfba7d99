"""Corrections for samples that another policy drew: weights, masks, and the split of mismatch from staleness."""

from __future__ import annotations

from libra.train.corrections.importance import effective_sample_frac, importance_weights
from libra.train.corrections.rejection import binary_kl_mask, off_policy_sequence_mask, rejection_mask
from libra.train.corrections.second_moment import m2po_mask
from libra.train.corrections.two_factor import TwoFactors, two_factor_metrics, two_factors

__all__ = [
    "TwoFactors",
    "binary_kl_mask",
    "effective_sample_frac",
    "importance_weights",
    "m2po_mask",
    "off_policy_sequence_mask",
    "rejection_mask",
    "two_factor_metrics",
    "two_factors",
]
