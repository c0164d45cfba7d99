"""The sections ``slurm`` and ``slurm_ROLE``: a cluster of Slurm jobs, with one kind of job per role of a worker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from libra.config.section import AtLeastOne, AtLeastZero, Section

_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT])i?B")
_MIB = {"K": 2**-10, "M": 1, "G": 2**10, "T": 2**20}
_WALLTIME = re.compile(r"(\d+-)?\d{1,3}(:\d{2}){0,2}")


class SlurmJobs(Section):
    """Jobs of one role; each is one Dask worker."""

    jobs: AtLeastZero | None = None
    """Jobs of this role to keep running; a lost one is submitted again. None: the number of workers in section `cluster`."""
    partition: str | None = None
    """Partition to submit them to. None: Slurm's default."""
    gpus: AtLeastZero = 0
    """GPUs of each job (--gres=gpu:N). For an entry of `cluster.engines` a number above 0 means its tensor-parallel degree."""
    cpus: AtLeastOne = 8
    """CPU cores of each job; of an entry of `cluster.engines`, of each tensor-parallel rank."""
    memory: str = "32 GiB"
    """Memory of each job, e.g. "64 GiB"; of an entry of `cluster.engines`, of each tensor-parallel rank."""
    walltime: str = "04:00:00"
    """Time limit in Slurm's form: MINUTES, HH:MM:SS or DAYS-HH:MM:SS. A worker stops taking work `slurm.drain_s` before it."""
    directives: list[str] = []
    """Further lines for #SBATCH, e.g. ["--exclusive", "--constraint=a100"]."""
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
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the scheduler. 0: any free port."""
    account: str | None = None
    """Account to charge. None: Slurm's default."""
    setup: list[str] = []
    """Shell lines at the beginning of each job, e.g. ["module load cuda/12.8"]."""
    python: str | None = None
    """Python of the jobs. None: the one that runs `libra`, which all nodes must then have at the same path."""
    reconcile_s: Annotated[float, Field(ge=1)] = 15.0
    """Seconds between two queries of Slurm's queue for lost jobs."""
    drain_s: Annotated[float, Field(ge=1)] = 120.0
    """Seconds before a job's time limit at which its worker stops taking work; it leaves when its running work has finished."""


class SlurmRolloutJobs(SlurmJobs):
    """Slurm jobs of workers with an engine each (`rollout.slots` generations at once)."""


class SlurmTrainJobs(SlurmJobs):
    """Slurm jobs of workers with a training replica each."""


class SlurmToolJobs(SlurmJobs):
    """Slurm jobs of workers that run tools and graders (`cluster.tool_slots` at once); the first writes the store."""
