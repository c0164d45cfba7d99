"""Training: advantages, losses, packing, and the replica that takes steps."""

from __future__ import annotations

from libra.train.advantages import group_advantages, grpo
from libra.train.kl import k3
from libra.train.packing import MicroBatch, Sample, fill_rows, pack, sample_of
from libra.train.partition import karmarkar_karp
from libra.train.policy_loss import clipped_policy_loss
from libra.train.replica import Replica
from libra.train.report import StepReport
from libra.train.settings import TrainSettings

__all__ = [
    "MicroBatch",
    "Replica",
    "Sample",
    "StepReport",
    "TrainSettings",
    "clipped_policy_loss",
    "fill_rows",
    "group_advantages",
    "grpo",
    "k3",
    "karmarkar_karp",
    "pack",
    "sample_of",
]
