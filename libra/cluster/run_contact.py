"""How a run that is going on is reached: a file in its directory that says where its scheduler is.

Invariants
----------
1. ``scheduler.json`` is there from the moment the run can be asked for something until its driver ends; of a driver that was
   killed it stays, and nobody answers at its address.
2. Only its owner may read it: it names the scheduler, and the files with which one is let in.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from libra.cluster.scheduler_address import connect, write_private
from libra.errors import ClusterError, RunDirectoryError

if TYPE_CHECKING:
    from distributed import Client

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
        What ``--scheduler`` takes: an address, or the path of a cluster.json.
    hybrid_workers : int
        `cluster.hybrid_workers`: how many of its workers can change roles.
    """

    run: str
    epoch: int
    scheduler: str
    hybrid_workers: int

    def write(self, directory: Path) -> None:
        """Put the file into the run's directory."""
        write_private(directory / FILE, json.dumps(asdict(self)) + "\n")


def forget(directory: Path) -> None:
    """Take the file away; nothing where there is none."""
    (directory / FILE).unlink(missing_ok=True)


def reach(run_dir: Path, scheduler: str | None = None) -> tuple[Client, RunContact]:
    """A client of the scheduler of the run in ``run_dir``, and which run that is.

    Parameters
    ----------
    run_dir : Path
    scheduler : str, optional
        Another way to the same scheduler.

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
    again = f"type libra resume {run_dir} to go on with it"
    try:
        contact = RunContact(**json.loads((run_dir / FILE).read_text()))
    except FileNotFoundError:
        raise ClusterError(
            f"{run_dir}: this run is not running, or has not begun its first iteration yet; {again}"
        ) from None
    except PermissionError:
        raise ClusterError(
            f"{run_dir / FILE}: only who started the run may read it, and ask it for something; type this as its owner"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise ClusterError(
            f"{run_dir / FILE}: it does not say where the run's scheduler is ({error}); {again}"
        ) from error
    try:
        return connect(scheduler or contact.scheduler, set_as_default=False), contact
    except (OSError, TimeoutError, ValueError) as error:
        raise ClusterError(
            f"{run_dir}: this run is not running, nobody answers at {scheduler or contact.scheduler}; {again}"
        ) from error
