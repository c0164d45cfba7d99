"""Training: advantages, losses, corrections, packing, and the replica that takes steps."""

from __future__ import annotations

from libra.train.advantages import GroupRewards, batch_advantages, group_advantages, grpo
from libra.train.aggregation import Aggregation
from libra.train.kl import k3, kl_estimate
from libra.train.packing import MicroBatch, Sample, fill_rows, pack, sample_of
from libra.train.partition import karmarkar_karp
from libra.train.replica import Replica
from libra.train.report import StepReport
from libra.train.sequences import Packed, Padded, Sequences
from libra.train.settings import TrainSettings

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
    "group_advantages",
    "grpo",
    "k3",
    "karmarkar_karp",
    "kl_estimate",
    "pack",
    "sample_of",
]
