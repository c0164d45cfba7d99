"""How a worker of a run is killed at one moment: functions that are sent to its process and arm it.

Each waits for a moment that only the work itself can reach, writes down where it was, once for all processes of a case, and sends
SIGKILL to its own process.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

CHUNK_BYTES = 2048
"""Bytes that a fetch reads at once in an armed process, so that there are moments in the middle of a small file."""


def die(marker: str, **where: Any) -> None:
    """Write down ``where`` and die; only the first of a case does."""
    try:
        handle = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except (FileExistsError, FileNotFoundError):  # it has happened, or its case is over and its directory gone
        return
    os.write(handle, json.dumps(where).encode())
    os.close(handle)
    os.kill(os.getpid(), signal.SIGKILL)


def _original(owner: Any, name: str) -> Any:
    """What ``owner.name`` was before it was armed for the first time: an earlier case may have left this process alive."""
    kept = f"_unarmed_{name}"
    if not hasattr(owner, kept):
        setattr(owner, kept, getattr(owner, name))
    return getattr(owner, kept)


def in_reduction(run: str, marker: str, during: bool, dask_worker: Any) -> None:
    """A core rank, when it has computed its slice: before the sum over the group, or while that is under way."""
    import torch.distributed as dist

    group = dask_worker.plugins[f"libra-{run}"].gang.group
    sum_ = group.sum_

    def deadly(tensors: Any) -> int:
        where = {"worker": str(dask_worker.name), "rank": group.rank, "tensors": len(tensors), "during": during}
        if not during:
            die(marker, **where)
        reduce = dist.all_reduce

        def halfway(flat: Any) -> None:
            reduce(flat, async_op=True)
            die(marker, **where)

        dist.all_reduce = halfway
        return int(sum_(tensors))

    group.sum_ = deadly


def in_turn(run: str, marker: str, nth: int, dask_worker: Any) -> None:
    """An engine, after the nth forward pass from which a request goes on: tokens of a turn are made, and none is recorded."""
    from libra.rollout.slot_batch import SlotBatch

    step, seen = _original(SlotBatch, "step"), []

    def deadly(batch: Any) -> Any:
        ended = step(batch)
        half = [slot for slot, job in enumerate(batch.table.jobs) if job is not None and batch.table.generated[slot]]
        if half:
            seen.append(1)
            if len(seen) == nth:
                die(marker, worker=str(dask_worker.name), unfinished=len(half))
        return ended

    SlotBatch.step = deadly  # type: ignore[method-assign]


def in_fetch(run: str, marker: str, fraction: float, dask_worker: Any) -> None:
    """A worker that fetches weights, when it has this fraction of a large file."""
    from libra.weights import transfer

    transfer.WINDOW_BYTES = CHUNK_BYTES
    fetch_file = _original(transfer, "_fetch_file")

    def armed(channel: Any, version: int, path: Path, max_bytes: int) -> None:
        def at_fraction(got: int, size: int) -> None:
            if got >= fraction * size and size > 64 * CHUNK_BYTES:
                part = path.stat().st_size
                facts = {"version": version, "file": path.name, "got": got, "size": size, "written": part}
                die(marker, worker=str(dask_worker.name), **facts)

        fetch_file(_Counted(channel, at_fraction), version, path, max_bytes)

    transfer._fetch_file = armed


class _Counted:
    """A channel whose bytes of one file are counted."""

    def __init__(self, channel: Any, counted: Any) -> None:
        self._channel, self._counted = channel, counted
        self._size = self._got = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def recv_frame(self) -> Any:
        answer = self._channel.recv_frame()
        self._size = int((answer or {}).get("size", 0))
        return answer

    def recv_some(self, view: memoryview) -> int:
        got: int = self._channel.recv_some(view)
        self._got += got
        self._counted(self._got, self._size)
        return got
