"""Section ``slurm``: a cluster of Slurm jobs, with one kind of job for each role of a worker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from libra.config.section import AtLeastOne, AtLeastZero, Section

_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT])i?B")
_MIB = {"K": 2**-10, "M": 1, "G": 2**10, "T": 2**20}
_WALLTIME = re.compile(r"(\d+-)?\d{1,3}(:\d{2}){0,2}")
Role = Literal["rollout", "train", "tool"]


class SlurmJobs(Section):
    """Jobs of one role; each is one Dask worker."""

    partition: str | None = None
    """Partition to submit them to. None: Slurm's default."""
    gpus: AtLeastZero = 0
    """GPUs of each job (--gres=gpu:N). For an entry of `cluster.engines` a number above 0 means its tensor-parallel degree."""
    cpus: AtLeastOne = 8
    """CPU cores of each job; of an entry of `cluster.engines`, of each tensor-parallel rank."""
    memory: str = "32 GiB"
    """Memory of each job, e.g. "64 GiB"; of an entry of `cluster.engines`, of each tensor-parallel rank."""
    walltime: str = "04:00:00"
    """Time limit in Slurm's form: MINUTES, HH:MM:SS or DAYS-HH:MM:SS. A worker takes no new work in the last two minutes."""
    directives: list[str] = []
    """Further lines for #SBATCH, e.g. ["--account=lab", "--exclusive"]."""
    skip: list[Literal["--mem", "--cpus-per-task", "--gres", "--ntasks", "--time"]] = []
    """Options to leave out of each job, where the site's sbatch refuses them, e.g. ["--mem"]."""

    @field_validator("memory")
    @classmethod
    def _memory_has_a_unit(cls, memory: str) -> str:
        found = _MEMORY.fullmatch(memory)
        if found is None or float(found[1]) * _MIB[found[2]] < 1:
            raise ValueError(f"{memory!r} is not an amount of memory of at least 1 MiB; type e.g. 64 GiB")
        return memory

    @field_validator("walltime")
    @classmethod
    def _walltime_is_slurms(cls, walltime: str) -> str:
        if not _WALLTIME.fullmatch(walltime):
            raise ValueError(f"{walltime!r} is not a time limit in Slurm's form; type e.g. 04:00:00 or 1-12:00:00")
        return walltime


class SlurmSection(Section):
    """A cluster of Slurm jobs (`libra cluster slurm`), one for each rollout, train and tool worker."""

    dir: Annotated[Path, Field(strict=False)] = Path("slurm")
    """Directory for its certificates, logs and cluster.json. All nodes must see it, and only its owner should read it."""
    host: str | None = None
    """Name or address at which the jobs reach the scheduler, which runs where `up` is typed. None: the machine's address."""
    setup: list[str] = []
    """Shell lines at the beginning of each job, e.g. ["module load cuda/12.8"]."""
    python: str | None = None
    """Python of the jobs. None: the one that runs `libra`, which all nodes must then have at the same path."""
    jobs: dict[Role, SlurmJobs] = {}
    """Jobs of each role, one for each of its workers in section `cluster`; a lost one is submitted again. E.g. `{train: {gpus: 1}}`."""

    def of_role(self, role: Role) -> SlurmJobs:
        """Jobs of the workers of a role."""
        return self.jobs.get(role, SlurmJobs())
