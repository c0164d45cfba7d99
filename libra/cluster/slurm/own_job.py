"""One Slurm job of ours: submitted under a number that is read with care, and cancelled only while
it has our name."""

from __future__ import annotations

import asyncio
import logging
import re

from dask_jobqueue.slurm import SLURMJob

from libra.cluster.slurm.queue import squeue
from libra.errors import ClusterError

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"^\s*(?:Submitted batch job )?(\d+)(?:;\S+| on cluster \S+)?\s*$", re.MULTILINE)
"""A line of sbatch's answer that is a job's number: with ``--parsable``, and from a wrapper that
leaves it out."""


class OwnJob(SLURMJob):  # type: ignore[misc]
    """`SLURMJob` for a login node whose sbatch writes more than a number, and for numbers that may
    be another job's."""

    submit_command = "sbatch --parsable"

    async def _submit_job(self, script_filename: str) -> str:
        """The job's number; ClusterError with sbatch's words where there is none."""
        command = [*self.submit_command.split(), script_filename]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = (text.decode(errors="replace") for text in await process.communicate())
        if process.returncode != 0:
            words = " ".join((err.strip() or out).split()) or f"exit code {process.returncode}, and no word"
            role = str(self.name).rpartition("-")[0]
            raise ClusterError(
                f"sbatch refused the job of worker {self.name}: {words}; libra cluster slurm CONFIG --print shows its script. To "
                f"leave an option of it out, type e.g. slurm.jobs.{role}.skip=[--mem]"
            )
        numbers = list(dict.fromkeys(_NUMBER.findall(out)))
        if len(out.split()) > 1:  # a banner, whose numbers are nobody's or another's
            numbers = [number for number in numbers if await self._is_ours(number)]
        if not numbers:
            raise ClusterError(
                f"sbatch's answer for worker {self.name} has no line with the number of a job named {self.job_name}: "
                f"{' '.join(out.split())[-300:]!r}; squeue --me shows whether it was submitted"
            )
        return numbers[-1]

    async def close(self) -> None:
        """Cancel the job if it is in the queue under our name."""
        if not self.job_id:
            return
        if await self._is_ours(self.job_id):
            await super().close()
        else:
            logger.warning("job %s is not cancelled: no job %s of this user", self.job_id, self.job_name)

    async def _is_ours(self, number: str) -> bool:
        try:
            rows = await asyncio.to_thread(squeue, f"--jobs={number}", "--format=%j")
        except ClusterError as error:  # no such job, or a controller that does not answer
            logger.warning("the name of job %s is not known: %s", number, error)
            return False
        return self.job_name in [row.strip() for row in rows]
