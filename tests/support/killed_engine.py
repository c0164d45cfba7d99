"""Kills a worker between a generation and its record, once: an agent waits for that turn meanwhile."""

import os
import signal
from pathlib import Path
from typing import Any

from libra.store.record_codec import unpack


def kill_at_generation(run: str, turn: int, flag: Path, dask_worker: Any) -> None:
    """Let the first worker that generated a turn of this number kill itself before it has a record."""
    journal = dask_worker.plugins[f"libra-{run}"].context.journal
    append = journal.append

    def watched(name: str, quantum: int, *records: bytes) -> None:
        record = unpack(records[0], source=name)
        if record["kind"] == "generation" and record["turn"] == turn:
            try:
                flag.open("x").close()
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        append(name, quantum, *records)

    journal.append = watched
