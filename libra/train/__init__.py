"""Training: advantages, losses, packing, and the replica that takes steps."""

from __future__ import annotations

from libra.train.advantages import group_advantages, grpo
from libra.train.kl import k3
from libra.train.packing import MicroBatch, Sample, pack, sample_of
from libra.train.partition import greedy_partition, karmarkar_karp, partition_groups
from libra.train.policy_loss import clipped_policy_loss
from libra.train.replica import Replica
from libra.train.report import StepReport
from libra.train.rows import fill_rows, fill_rows_by_group, fill_rows_mffd
from libra.train.settings import TrainSettings

__all__ = [
    "MicroBatch",
    "Replica",
    "Sample",
    "StepReport",
    "TrainSettings",
    "clipped_policy_loss",
    "fill_rows",
    "fill_rows_by_group",
    "fill_rows_mffd",
    "greedy_partition",
    "group_advantages",
    "grpo",
    "k3",
    "karmarkar_karp",
    "pack",
    "partition_groups",
    "sample_of",
]
