"""Kills a worker between a generation and its record, once: an agent waits for that turn meanwhile."""

import os
import signal
from pathlib import Path
from typing import Any

from libra.store.quantum_records import GenerationRecord, QuantumRecord
from libra.store.record_codec import struct_decoder, unpack_all


def kill_at_generation(run: str, turn: int, flag: Path, dask_worker: Any) -> None:
    """Let the first worker that generated a turn of this number kill itself before it has a record."""
    journal = dask_worker.plugins[f"libra-{run}"].context.journal
    append = journal.append

    def watched(name: str, quantum: int, *records: bytes) -> None:
        (record,) = unpack_all(records[0], struct_decoder(QuantumRecord), source=name)
        if isinstance(record, GenerationRecord) and record.turn == turn:
            try:
                flag.open("x").close()
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        append(name, quantum, *records)

    journal.append = watched
