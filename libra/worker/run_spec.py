"""The facts of a run that every worker needs, sent once when the run starts; tasks then refer to the run by name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from libra import keys
from libra.config import RunConfig
from libra.envs import Environment, check_state, make_environment
from libra.envs.mcp_tools import with_mcp_tools
from libra.envs.retries import BackOff
from libra.types import TrajectoryId


class RunFiles:
    """Where the files of a run are."""

    __slots__ = ()
    directory: Path

    @property
    def journal_dir(self) -> Path:
        """Records of quanta, removed once their group is in the store."""
        return self.directory / "journal"

    @property
    def groups_dir(self) -> Path:
        """Immutable group records."""
        return self.directory / "groups"

    @property
    def batches_dir(self) -> Path:
        """Membership of each batch."""
        return self.directory / "batches"

    @property
    def waves_dir(self) -> Path:
        """Groups of each wave of a streamed step."""
        return self.directory / "waves"

    @property
    def late_dir(self) -> Path:
        """Late rewards that were delivered."""
        return self.directory / "late"

    @property
    def teacher_dir(self) -> Path:
        """What the teacher says of groups."""
        return self.directory / "teacher"

    @property
    def epochs_dir(self) -> Path:
        """One file for each start of the run."""
        return self.directory / "epochs"

    @property
    def weights_dir(self) -> Path:
        """The weight registry."""
        return self.directory / "weights"

    @property
    def checkpoints_dir(self) -> Path:
        """Checkpoints, and the link to the best."""
        return self.directory / "checkpoints"

    @property
    def store_path(self) -> Path:
        """The zarr store."""
        return self.directory / "trajectories.zarr"

    @property
    def evaluations_dir(self) -> Path:
        """Outcomes of evaluations, by version."""
        return self.directory / "evaluations"

    @property
    def steps_dir(self) -> Path:
        """Numbers of the steps taken."""
        return self.directory / "steps"


@dataclass(frozen=True, slots=True)
class RunDirectory(RunFiles):
    """The directory of a run, of which nothing has been read yet."""

    directory: Path


@dataclass(frozen=True, slots=True)
class RunSpec(RunFiles):
    """A started run.

    Attributes
    ----------
    run : str
        Its name.
    epoch : int
        Which start of the run this is, from 0.
    directory : Path
        The run directory, on storage that every worker and the scheduler reach.
    model_dir : str
        Resolved model: a directory, or a Hugging Face id.
    config : RunConfig
    environment : Environment or None
        One given as an object (``libra.train``); None: made from ``config.environment``.
    from_checkpoint : Path or None
        Directory, checked and without links, whose weights are version 0; None: ``model_dir`` itself.
    secret : str
        Secret by which workers authenticate each other in transfers.
    """

    run: str
    epoch: int
    directory: Path
    model_dir: str
    config: RunConfig
    environment: Environment | None = None
    from_checkpoint: Path | None = None
    secret: str = field(default="", repr=False)

    def key(self, node: str, *indices: int, split: str = "train") -> str:
        """Dask key of one node of this start of the run."""
        return keys.make(node, indices, epoch=self.epoch, run=self.run, split=split)

    def make_environment(self) -> Environment:
        """The environment, the same on every worker."""
        section = self.config.environment
        environment = self.environment
        if environment is None:
            environment = make_environment(section.name, dict(section.args), self.config.run.seed)
        if "mcp" in section.tools and not self.config.agent.given:
            environment = with_mcp_tools(environment, section.tools["mcp"], section.tools_env)
        if self.config.rollout.tool_format is not None:
            environment.tool_format = self.config.rollout.tool_format
        return check_state(environment)

    @property
    def back_off(self) -> BackOff:
        """How calls are tried again that an API refuses for now."""
        section = self.config.environment
        return BackOff(section.retries, seed=self.config.run.seed)

    def turn_seed(self, tid: TrajectoryId, turn: int, draw: int = 0) -> int:
        """Seed of one generation, from the run's seed and the position only; ``draw`` counts fresh starts of the trajectory.

        The evaluations before and after training use the same questions with the same seeds: for split "eval" the
        iteration (a weight version) is left out.
        """
        iteration = tid.iteration if tid.split == "train" else 0
        text = f"{self.config.run.seed}/{tid.split}/{iteration}/{tid.group}/{tid.sample}/{turn}"
        if draw:
            text += f"/{draw}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
