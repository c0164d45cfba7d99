"""Connecting to a running run: a file in its directory has the address of its scheduler.

Invariants
----------
1. ``scheduler.json`` exists from the moment the run takes requests until its driver ends. After a driver was killed it stays, and
   its address may not answer.
2. Only its owner may read it: it has the key of the cluster, or names its file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from libra.cluster.certificates import security_of, write_private
from libra.cluster.scheduler_address import connect
from libra.errors import ClusterError, RunDirectoryError, shell_path
from libra.seals import parsed_json

if TYPE_CHECKING:
    from distributed import Client
    from distributed.security import Security

FILE = "scheduler.json"


@dataclass(frozen=True, slots=True)
class RunContact:
    """What ``RUN/scheduler.json`` holds.

    Attributes
    ----------
    run : str
    epoch : int
        This start of the run.
    scheduler : str
        Value of ``--scheduler``: an address, or the path of a cluster.json.
    hybrid_workers : int
        `cluster.hybrid_workers`: workers that can change roles.
    certificate, key, authority : str
        What the driver connected with, as PEM texts or paths; "" for an open scheduler.
    """

    run: str
    epoch: int
    scheduler: str
    hybrid_workers: int
    certificate: str = ""
    key: str = field(default="", repr=False)
    authority: str = ""

    def security(self) -> Security | None:
        """For other clients of that scheduler; None for an open one."""
        return security_of(self.certificate, self.key, self.authority) if self.key else None

    def write(self, directory: Path) -> None:
        """Write the file into the run's directory."""
        write_private(directory / FILE, json.dumps(asdict(self)) + "\n")


def forget(directory: Path) -> None:
    """Remove the file, if there is one."""
    (directory / FILE).unlink(missing_ok=True)


def reach(run_dir: Path, scheduler: str | None = None) -> tuple[Client, RunContact]:
    """A client of the scheduler of the run in ``run_dir``, and the contact of that run.

    Parameters
    ----------
    run_dir : Path
    scheduler : str, optional
        Another address of the same scheduler.

    Raises
    ------
    RunDirectoryError
        There is no run in ``run_dir``.
    ClusterError
        It is not running.
    """
    if not (run_dir / "config.resolved.yaml").is_file():
        raise RunDirectoryError(
            f"{run_dir}: no run here, it has no config.resolved.yaml; type the directory of a run, such as runs/NAME"
        )
    again = f"type libra resume {shell_path(run_dir)} to continue it"
    try:
        contact = RunContact(**parsed_json((run_dir / FILE).read_text()))
    except FileNotFoundError:
        raise ClusterError(
            f"{run_dir}: this run is not running, or has not started its first iteration; {again}"
        ) from None
    except PermissionError:
        raise ClusterError(
            f"{run_dir / FILE}: only the user who started the run may read it; type this as that user"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise ClusterError(f"{run_dir / FILE}: it has no address of the run's scheduler ({error}); {again}") from error
    try:
        return connect(scheduler or contact.scheduler, security=contact.security(), set_as_default=False), contact
    except (OSError, TimeoutError, ValueError) as error:
        raise ClusterError(
            f"{run_dir}: this run is not running, no scheduler answers at {scheduler or contact.scheduler}; {again}"
        ) from error
