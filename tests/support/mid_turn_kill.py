"""Kills a process in the middle of a turn, around the record of one of its parts."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from libra.store.record_codec import unpack

AT = 2
"""Quantum whose record is the moment: the third part of a first turn."""


def kill_at_part(run: str, first: Path, dask_worker: Any, *, after: bool) -> None:
    """Let the first worker with a record `AT` of a part kill itself, ``after`` it or before.

    The trajectory is named in the file ``first``.
    """
    journal = dask_worker.plugins[f"libra-{run}"].context.journal
    append = journal.append

    def kill(name: str) -> None:
        try:
            with first.open("x") as file:
                file.write(name)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def watched(name: str, quantum: int, *records: bytes) -> None:
        now = quantum == AT and unpack(records[0], source=name).get("stop_reason") == "parked"
        if now and not after:
            kill(name)
        append(name, quantum, *records)
        if now:
            kill(name)

    journal.append = watched
