"""A step of a finished run taken again from its record in float64, in its waves and whole: how far apart gradients and weights are.

Sums in another order differ by rounding alone, and in float64 that is far below `SAME`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from libra.config import RunConfig, load_config
from libra.config.model_paths import resolve_model
from libra.store.run_records import in_waves, read_batch_facts
from libra.store.trajectory_store import TrajectoryStore
from libra.train import Replica, TrainSettings
from libra.types import Trajectory
from libra.weights import WeightStore
from libra.worker.model_files import link_model

SAME = 1e-12
"""Norm of a difference over the norm, up to which gradients and weights count as equal."""


class Apart(NamedTuple):
    """Norm of the difference over the norm, of unclipped gradients and of weights after the step."""

    gradient: float
    weights: float
    waves: int
    grad_norm: float

    @property
    def equal(self) -> bool:
        return max(self.gradient, self.weights) <= SAME


def recorded_waves(directory: Path, batch: int) -> list[list[Trajectory]]:
    """Stored trajectories of each wave of a committed batch, without those that the step left out."""
    rows = read_batch_facts(directory / "batches", batch)["groups"]
    with TrajectoryStore.open(directory / "trajectories.zarr", mode="r") as store:
        ids = zip(*(store.columns()[name].tolist() for name in ("split", "iteration", "group", "sample")), strict=True)
        index = {tuple(each): number for number, each in enumerate(ids)}
        waves = []
        for wave in in_waves(rows):
            members = []
            for row in wave:
                for sample, (advantage, trains) in enumerate(zip(row["advantages"], row["trains"], strict=True)):
                    one = store.trajectory(index["train", row["iteration"], row["group"], sample])
                    one.advantage = advantage
                    if trains or not one.failure.trains:
                        members.append(one)
            waves.append(members)
    return waves


def apart(directory: Path, batch: int, threads: int) -> Apart:
    """Take step ``batch`` of a streamed run in its waves and whole, with a fresh optimizer."""
    config, waves = load_config(directory / "config.resolved.yaml"), recorded_waves(directory, batch)
    assert waves, f"{directory}: step {batch} was not streamed"
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = Path(resolve_model(config.model.path))
        link_model(model_dir, WeightStore(directory / "weights").get(batch), Path(scratch))
        whole, streamed = (_Recorded(Path(scratch), model_dir, config, threads) for _ in range(2))
    report = whole.replica.step([one for wave in waves for one in wave], 0)
    for wave in waves:
        streamed.replica.accumulate(wave, 0)
    streamed.replica.close(0)
    ours, theirs = ([*each.replica.weights().values()] for each in (streamed, whole))
    return Apart(_apart(streamed.gradient, whole.gradient), _apart(ours, theirs), len(waves), report.grad_norm)


class _Recorded:
    """A replica in float64 that keeps the gradient which it applies, before clipping."""

    def __init__(self, weights_dir: Path, model_dir: Path, config: RunConfig, threads: int) -> None:
        settings = TrainSettings.of_run(config)
        self.replica = Replica(
            weights_dir, settings, dtype=torch.float64, threads=threads, seed=config.run.seed, base_dir=model_dir
        )
        self.gradient: list[torch.Tensor] = []
        self._apply = self.replica.apply_gradient
        self.replica.apply_gradient = self._keep  # type: ignore[method-assign]

    def _keep(self, step: int, tally: Any) -> None:
        found = (parameter.grad for parameter in self.replica.optimized().values())
        self.gradient = [gradient.clone() for gradient in found if gradient is not None]
        self._apply(step, tally)


def _apart(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    difference, norm = (
        torch.cat([tensor.flatten() for tensor in tensors])
        for tensors in ([a - b for a, b in zip(ours, theirs, strict=True)], theirs)
    )
    return float(torch.linalg.norm(difference) / torch.linalg.norm(norm))
