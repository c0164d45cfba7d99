"""States of our jobs in Slurm's queue."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable

from libra.errors import ClusterError

ALIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "STOPPED"}
"""States of a job that has not ended."""


def job_states(job_ids: Iterable[str]) -> dict[str, tuple[str, str]]:
    """State and reason (or node) of each job in the queue, by job id; ClusterError where squeue
    fails."""
    ids = set(job_ids)
    rows = (line.split("|", 2) for line in (squeue("--format=%i|%T|%R") if ids else ()) if line.count("|") >= 2)
    return {job: (state, reason) for job, state, reason in rows if job in ids}


def squeue(*options: str) -> list[str]:
    """The lines of squeue about jobs of this user, in any state; ClusterError where it fails."""
    command = ["squeue", "--noheader", "--me", "--states=all", *options]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise ClusterError(
            "squeue: there is no Slurm on this machine; type this on a login node of the cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise ClusterError(
            "squeue: Slurm's controller did not answer within 60 s; type sinfo, and ask your administrator"
        ) from None
    if answer.returncode != 0:
        raise ClusterError(
            f"squeue failed: {answer.stderr.strip()}; type sinfo to see whether Slurm's controller answers"
        )
    return answer.stdout.splitlines()


def lost(states: dict[str, tuple[str, str]], job_ids: Iterable[str]) -> list[str]:
    """Jobs that have ended, or are no longer in the queue."""
    return [job for job in job_ids if states.get(job, ("GONE", ""))[0] not in ALIVE]
