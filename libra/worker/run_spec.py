"""A run's facts for all workers, sent once when the run starts; tasks then name the run.

The run's secret travels inside the spec over an encrypted connection, else in a file that only its
owner can read: Dask sends pickled data, which anyone on the network can read over ``tcp://``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from libra import keys
from libra.cluster.connection import write_private
from libra.config import RunConfig
from libra.envs import Environment, check_state, make_environment
from libra.envs.mcp_tools import with_mcp_tools
from libra.envs.retries import BackOff
from libra.errors import ClusterError
from libra.types import TrajectoryId


class _Below:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, files: RunFiles, kind: type[RunFiles]) -> Path:
        return files.directory / self._name


class RunFiles:
    """Paths of a run's files."""

    __slots__ = ()
    directory: Path

    journal_dir = _Below("journal")  # records of quanta, removed once their group is in the store
    groups_dir = _Below("groups")  # immutable group records
    batches_dir = _Below("batches")  # membership of each batch
    waves_dir = _Below("waves")  # groups of each wave of a streamed step
    late_dir = _Below("late")  # late rewards that were delivered
    teacher_dir = _Below("teacher")  # a teacher's scores of groups
    epochs_dir = _Below("epochs")  # one file for each start of the run
    weights_dir = _Below("weights")  # the weight registry
    checkpoints_dir = _Below("checkpoints")  # checkpoints, and the link to the best
    store_path = _Below("trajectories.zarr")
    evaluations_dir = _Below("evaluations")  # outcomes of evaluations, by version
    steps_dir = _Below("steps")  # numbers of the steps taken


@dataclass(frozen=True, slots=True)
class RunDirectory(RunFiles):
    """The directory of a run whose configuration is not read yet."""

    directory: Path


@dataclass(frozen=True, slots=True)
class RunSpec(RunFiles):
    """One start of a run."""

    run: str
    epoch: int  # number of this start of the run, from 0
    directory: Path  # run directory, on storage that all workers and the scheduler reach
    model_dir: str  # resolved model: a directory, or a Hugging Face id
    config: RunConfig
    environment: Environment | None = None  # object given to ``libra.train``; None: the configured one
    from_checkpoint: Path | None = None  # verified, resolved directory of version 0; None: ``model_dir``
    secret: str = field(default="", repr=False)  # authenticates transfers between workers

    def key(self, node: str, *indices: int, split: str = "train") -> str:
        """Dask key of a node in this start of the run."""
        return keys.make(node, indices, epoch=self.epoch, run=self.run, split=split)

    def make_environment(self) -> Environment:
        """Build the environment, equally on every worker."""
        section, tool_format = self.config.environment, self.config.rollout.tool_format
        environment = self.environment
        if environment is None:
            environment = make_environment(section.name, dict(section.args), self.config.run.seed)
        if "mcp" in section.tools and not self.config.agent.given:
            environment = with_mcp_tools(environment, section.tools["mcp"], section.tools_env)
        if tool_format is not None:
            environment.tool_format = tool_format
        return check_state(environment)

    @property
    def back_off(self) -> BackOff:
        """Back-off for calls that an API temporarily refuses."""
        return BackOff(self.config.environment.retries, seed=self.config.run.seed)

    def turn_seed(self, tid: TrajectoryId, turn: int, draw: int = 0) -> int:
        """Seed of one generation, from the run's seed and position; ``draw`` counts fresh attempts.

        For split "eval" the iteration is ignored, so that all evaluations share seeds.
        """
        iteration = tid.iteration if tid.split == "train" else 0
        text = f"{self.config.run.seed}/{tid.split}/{iteration}/{tid.group}/{tid.sample}/{turn}"
        text += f"/{draw}" if draw else ""
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


SECRET_FILE = "secret"
ENCRYPTED = ("tls://", "inproc://")
"""Schemes of scheduler addresses whose traffic cannot be read by others."""


def sendable_spec(spec: RunSpec, scheduler: str) -> tuple[RunSpec, Path | None]:
    """``spec`` as that scheduler may send it, and the file with its secret if that is separate."""
    if scheduler.startswith(ENCRYPTED):
        return spec, None
    config, path = spec.config, None
    peers = "peer" in (config.trainer.dispatch, config.weights.transfer) or config.rollout.kv_host_gib is not None
    if peers or config.cluster.hybrid_workers or config.cluster.train_workers > 1:
        path = spec.directory / SECRET_FILE
        write_private(path, spec.secret)
    return replace(spec, secret=""), path


def with_secret(spec: RunSpec, path: Path | None) -> RunSpec:
    """Restore the secret of a spec on a worker. Raises ClusterError if the file is unreadable."""
    try:
        return spec if path is None else replace(spec, secret=path.read_text())
    except OSError as error:
        raise ClusterError(
            f"{path}: this worker cannot read the run's secret ({error.strerror}), which an open scheduler must not send; start "
            "scheduler and workers with a key: libra cluster tls DIR"
        ) from error


def forget_secret(directory: Path) -> None:
    (directory / SECRET_FILE).unlink(missing_ok=True)
