"""The training replica of a worker, from the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from libra.tensors import compute_device
from libra.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from libra.train import Replica
    from libra.train.replica_group import TrainGroup

NOT_THE_REPLICAS = (
    "algorithm",
    "prompts",
    "group_size",
    "advantage",
    "normalize_std",
    "std_eps",
    "drop_uniform_groups",
    "drop_truncated",
    "resample",
    "dispatch",
)
"""Fields of ``trainer`` that shape the batch, its advantages and its way, before the replica sees it."""


def make_replica(spec: RunSpec, model_dir: Path, group: TrainGroup | None) -> Replica:
    """The replica that the configuration asks for, at version 0; a member of ``group`` where there is one."""
    from libra.train import Replica, TrainSettings
    from libra.train.checkpoint import has_optimizer

    config = spec.config
    settings = config.trainer.model_dump(exclude=set(NOT_THE_REPLICAS))
    if config.trainer.aggregation == "seq-mean-token-sum-norm" and settings["loss_divisor"] is None:
        settings["loss_divisor"] = float(config.rollout.max_context_tokens)
    start = spec.from_checkpoint
    replica = Replica(
        start or model_dir,
        TrainSettings(**settings, temperature=config.rollout.temperature, exact_logprobs=config.rollout.exact_logprobs),
        dtype=config.model.dtype,
        master_dtype=config.model.master_dtype,
        threads=config.cluster.threads,
        device=compute_device(config.cluster.device),
        seed=config.run.seed,
        base_dir=model_dir,
        group=group,
    )
    if start is not None and has_optimizer(start):
        replica.continue_optimizer(start)
    return replica
