"""The end of a run that lost its scheduler: the errors of a Dask client become one error with the command to type."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError

from libra.errors import ClusterError, LibraError, shell_path

if TYPE_CHECKING:
    from distributed import Client


@contextmanager
def scheduler_loss_named(client: Callable[[], Client | None], directory: Path, address: str | None) -> Iterator[None]:
    """Context manager: raises ClusterError if the scheduler is lost.

    Parameters
    ----------
    client : callable
        Gives the client at the time of an error; None: it is not connected yet.
    directory : Path
        Of the run.
    address : str, optional
        ``cluster.scheduler``, where it is set.
    """
    try:
        yield
    except LibraError:
        raise
    except (OSError, CancelledError) as error:
        connected = client()
        lost = isinstance(error, CommClosedError)
        lost |= isinstance(error, FutureCancelledError) and error.reason == "scheduler-connection-lost"
        if connected is None or (connected.status == "running" and not lost):
            raise
        logging.getLogger("distributed.client").addFilter(_is_no_cancellation)
        raise ClusterError(lost_scheduler_text(directory, address)) from error


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Drops what Dask logs if a client is closed while it still tries to reconnect: a traceback, and a wrong number of seconds."""
    cancelled = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not cancelled and not record.getMessage().startswith("Failed to reconnect to scheduler")


def lost_scheduler_text(directory: Path, address: str | None) -> str:
    """The message: what happened, what is kept, and what to type."""
    at, option = ("", "") if address is None else (f" at {address}", f" --scheduler {address}")
    return (
        f"the connection to the scheduler{at} is lost, and with it the tasks that ran; what is committed is kept. Start scheduler "
        f"and workers again where they are gone, then type libra resume {shell_path(directory)}{option}"
    )
