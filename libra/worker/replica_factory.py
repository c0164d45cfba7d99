"""The training replica of a worker, from the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from libra.tensors import compute_device
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from libra.train import Replica
    from libra.train.replica_group import TrainGroup


def make_replica(spec: RunSpec, model_dir: Path, group: TrainGroup | None) -> Replica:
    """The replica of the configuration, at version 0; a member of ``group`` if there is one."""
    from libra.train import Replica, TrainSettings
    from libra.train.checkpoint import has_optimizer

    config = spec.config
    start = spec.from_checkpoint
    replica = Replica(
        start or model_dir,
        TrainSettings.of_run(config),
        dtype=config.model.dtype,
        master_dtype=config.model.master_dtype,
        threads=config.cluster.threads,
        device=compute_device(config.cluster.device),
        seed=config.run.seed,
        base_dir=model_dir,
        group=group,
        loader=config.model.loader,
    )
    if start is not None and has_optimizer(start) and config.trainer.lora_rank is None:  # merged: new adapters begin
        replica.continue_optimizer(start)
    return replica
