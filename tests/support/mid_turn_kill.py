"""Kills a process in the middle of a turn, around the record of one of its parts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from libra.cluster.present_workers import present_workers
from libra.config import load_config
from libra.driver.session import Session
from libra.store.record_codec import unpack

AT = 2
"""Quantum whose record is the moment: the third part of a first turn."""


def kill_at_part(run: str, first: Path, driver: int | None, dask_worker: Any, *, after: bool = True) -> None:
    """Let the first worker with a record `AT` of a part kill ``driver``, if given, and itself, ``after`` it or before.

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
        for process in (driver, os.getpid()):
            if process is not None:
                os.kill(process, signal.SIGKILL)

    def watched(name: str, quantum: int, *records: bytes) -> None:
        now = quantum == AT and unpack(records[0], source=name).get("stop_reason") == "parked"
        if now and not after:
            kill(name)
        append(name, quantum, *records)
        if now:
            kill(name)

    journal.append = watched


def main(config_file: str, first: str) -> None:
    """A driver that dies with one of its workers."""
    with Session(load_config(Path(config_file))) as session:
        found = present_workers(session.client)
        rollout = [address for address, worker in found.items() if worker["name"].startswith("rollout")]
        session.client.run(kill_at_part, session.config.run.name, Path(first), os.getpid(), workers=rollout)
        for _ in session.iterations():
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
