"""Training: advantages, losses, corrections, packing, and the replica that takes steps."""

from __future__ import annotations

from libra.train.advantages import GroupRewards, batch_advantages, group_advantages, grpo
from libra.train.aggregation import Aggregation
from libra.train.balanced_partition import greedy_partition, karmarkar_karp, partition_groups
from libra.train.kl import k3, kl_estimate
from libra.train.replica import Replica
from libra.train.replica_settings import TrainSettings
from libra.train.row_packing import fill_rows, fill_rows_by_group, fill_rows_mffd
from libra.train.samples import Sample, sample_of
from libra.train.sequence_packing import MicroBatch, pack
from libra.train.sequences import Packed, Padded, Sequences
from libra.train.step_report import StepReport

__all__ = [
    "Aggregation",
    "GroupRewards",
    "MicroBatch",
    "Packed",
    "Padded",
    "Replica",
    "Sample",
    "Sequences",
    "StepReport",
    "TrainSettings",
    "batch_advantages",
    "fill_rows",
    "fill_rows_by_group",
    "fill_rows_mffd",
    "greedy_partition",
    "group_advantages",
    "grpo",
    "k3",
    "karmarkar_karp",
    "kl_estimate",
    "pack",
    "partition_groups",
    "sample_of",
]
