"""Training: advantages, losses, corrections, packing, and the replica that takes steps."""

from __future__ import annotations

from libra.train.advantages import GroupRewards, batch_advantages, grpo
from libra.train.losses import Aggregation, Sequences, kl_estimate
from libra.train.packing import MicroBatch, fill_rows, karmarkar_karp, pack
from libra.train.replica import Replica
from libra.train.replica_settings import TrainSettings
from libra.train.samples import Sample, sample_of
from libra.train.step_report import StepReport

__all__ = [
    "Aggregation",
    "GroupRewards",
    "MicroBatch",
    "Replica",
    "Sample",
    "Sequences",
    "StepReport",
    "TrainSettings",
    "batch_advantages",
    "fill_rows",
    "grpo",
    "karmarkar_karp",
    "kl_estimate",
    "pack",
    "sample_of",
]
