"""The journal: one record per finished quantum of a trajectory, outside Dask.

Each writer appends to its own log, and commits a record by linking that log to the record's name. A
link is an exclusive create that takes no inode, which is cheaper than a file per record.

1. A record is named (trajectory, quantum) and created once; a second writer gets RecordExists. Two
   quanta committed together, a generation and its inline action, have the name of the first.
2. A reader sees a whole record or none; bytes of a write that a crash cut short are never read.
3. A committed record never changes. `read` returns quanta in order, without gaps, up to the first
   missing quantum.
4. Any process that reaches the directory may append and read; no record is kept only in memory.
"""

# Plain strings and os, no pathlib: that would cost a fifth of an append, and two happen per quantum.
# ruff: noqa: PTH103, PTH108, PTH116

from __future__ import annotations

import os
import re
import struct
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from libra.errors import StoreError
from libra.store.exclusive_files import already_written, sync_directory, write_all, write_failure
from libra.store.quantum_records import QuantumRecord
from libra.store.record_codec import joined, pack, struct_decoder, unpack_all

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}")
_FRAME = struct.Struct("<HI")  # bytes of the record's name, bytes of the record
_IDENTITY_BYTES = 16
_DECODER = struct_decoder(QuantumRecord)
LOG_PREFIX = ".log-"
MOST_RECORDS = 4096
"""Records in one log: file systems limit the links of a file (ext4: 65,000), and a reader indexes a
log from its beginning."""
MOST_TOGETHER = 2
"""Records that may be appended together."""
_READ_BYTES = 1 << 13
"""Bytes of a log that a reader's first look for a record takes."""
KEPT_INDEXES = 256
"""Logs whose record positions a reader keeps; on one machine, it also keeps these logs open."""
KEPT_LOOKUPS = 32_768
"""Lookups after which a reader forgets an unused log, whose trajectories have ended."""


@dataclass(slots=True)
class _Log:
    path: str
    end: int
    descriptor: int | None = None
    """Open for writing; None if the log is opened for each record."""
    names: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _Index:
    """Positions of a log's records, up to ``end``; ``used`` is the number of the last lookup."""

    descriptor: int | None = None
    end: int = _IDENTITY_BYTES
    used: int = 0
    places: dict[str, tuple[int, int]] = field(default_factory=dict)


class Journal:
    """The records of all trajectories of a run that are not in the store yet.

    Parameters
    ----------
    root : Path
        Directory of ``<trajectory>.<quantum>.rec``, with hard links. Only workers that reach it can
        continue a lost worker's trajectories.
    fsync : bool
        Flush every record to the device before `append` returns. False: a record survives its
        process, not a power failure.
    one_machine : bool
        Whether all writers and readers are on this machine. Logs then stay open between two
        records; an open log is known by its inode, which no other file can take.
    """

    def __init__(self, root: Path, *, fsync: bool = False, one_machine: bool = False) -> None:
        self.root = os.fspath(root)
        self.fsync, self.one_machine = fsync, one_machine
        self._log: _Log | None = None
        self._indexes: OrderedDict[bytes | tuple[int, int], _Index] = OrderedDict()  # least recently used first
        self._lookups = 0
        self._lock = threading.Lock()

    def pack(self, trajectory_id: str, quantum: int, record: QuantumRecord) -> bytes:
        """A record as bytes for a later `append`; Unstorable if a type cannot be stored."""
        return pack(record, source=self._path(trajectory_id, quantum))

    def append(self, trajectory_id: str, quantum: int, *records: QuantumRecord | bytes) -> None:
        """Create the record of one quantum (0-based), or of several consecutive quanta, all or
        none.

        Raises
        ------
        RecordExists
            Another worker ran this quantum; the caller must stop.
        StoreError
            The record cannot be written (the message names a full disk).
        Unstorable
            A value has a type that cannot be stored.
        """
        path = self._path(trajectory_id, quantum)
        if not 1 <= len(records) <= MOST_TOGETHER:
            raise StoreError(
                f"{path}: got {len(records)} records to append together; one to {MOST_TOGETHER} are allowed"
            )
        packed = [record if isinstance(record, bytes) else pack(record, source=path) for record in records]
        data, name = joined(packed), path[len(self.root) + 1 :].encode()
        with self._lock:
            try:
                self._commit(path, name, _FRAME.pack(len(name), len(data)) + name + data)
            except FileExistsError:
                raise already_written(path) from None
            except OSError as error:
                raise write_failure(error, path) from error

    def _commit(self, path: str, name: bytes, frame: bytes) -> None:
        log = self._log
        if log is None or len(log.names) >= MOST_RECORDS:
            log = self._new_log()
        # Opened and closed each time: only then does NFS show the bytes to other machines.
        descriptor = log.descriptor if log.descriptor is not None else os.open(log.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            try:
                write_all(descriptor, frame, log.end)
                if self.fsync:
                    os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, log.end)
                raise
        finally:
            if log.descriptor is None:
                os.close(descriptor)
        try:
            os.link(log.path, path)
        except FileExistsError:
            # NFS: the link was made, only the first answer to us was lost.
            if name in log.names or os.stat(path).st_ino != os.stat(log.path).st_ino:
                raise
        log.end += len(frame)
        log.names.add(name)
        if self.fsync:
            sync_directory(self.root)

    def _new_log(self) -> _Log:
        identity = os.urandom(_IDENTITY_BYTES)
        path = f"{self.root}/{LOG_PREFIX}{identity.hex()}"
        os.makedirs(self.root, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, identity)
        except OSError:
            os.unlink(path)
            os.close(descriptor)
            raise
        if not self.one_machine:
            os.close(descriptor)
        self._close_log()
        self._log = _Log(path, _IDENTITY_BYTES, descriptor if self.one_machine else None)
        return self._log

    def _close_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            if log.descriptor is not None:
                os.close(log.descriptor)
            Path(log.path).unlink(missing_ok=True)

    def read(self, trajectory_id: str, start: int = 0, until: int = 0) -> list[QuantumRecord]:
        """Records from quantum ``start`` to the last before a gap; StoreError names a torn record.
        ``until`` is the number of quanta if the caller knows it, else 0."""
        records: list[QuantumRecord] = []
        path, stem = self._path(trajectory_id, start), f"{self.root}/{trajectory_id}"
        while (data := self._load(path)) is not None:
            records += unpack_all(data, _DECODER, source=path)
            if 0 < until <= start + len(records):
                break
            path = f"{stem}.{start + len(records):04d}.rec"
            if self.one_machine and not os.access(path, os.F_OK):  # an open that fails costs four times as much
                break
        return records

    def read_at(self, trajectory_id: str, quantum: int) -> list[QuantumRecord]:
        """The records appended together from ``quantum`` on; StoreError if missing or torn."""
        data = self._load(path := self._path(trajectory_id, quantum))
        if data is None:
            raise StoreError(f"{path}: there is no such record")
        return unpack_all(data, _DECODER, source=path)

    def trajectories(self) -> set[str]:
        """Trajectories that have a record."""
        try:
            names = [path.name for path in Path(self.root).iterdir()]
        except FileNotFoundError:
            return set()
        return {name.rsplit(".", 2)[0] for name in names if name.endswith(".rec")}

    def remove(self, trajectory_id: str) -> None:
        """Remove the records of a trajectory, if there are any."""
        names: list[str] = []
        path, stem = self._path(trajectory_id, 0), f"{self.root}/{trajectory_id}"
        quantum = missing = 0
        while missing < MOST_TOGETHER:  # there are no other gaps
            if os.access(path, os.F_OK):
                names.append(path)
                missing = 0
            else:
                missing += 1
            quantum += 1
            path = f"{stem}.{quantum:04d}.rec"
        try:
            for path in reversed(
                names
            ):  # the first is removed last, so that a removal cut short is noticed and repeated
                os.unlink(path)
        except FileNotFoundError:
            return  # another process removes it too
        except OSError as error:
            raise StoreError(f"{self.root}: cannot remove {trajectory_id}: {error.strerror}") from error

    def _path(self, trajectory_id: str, quantum: int) -> str:
        if not _ID.fullmatch(trajectory_id):
            raise StoreError(
                f"journal {self.root}: got trajectory id {trajectory_id!r}; allowed are letters, digits, '_', '.' and "
                "'-', as in train-3-0-7"
            )
        if quantum < 0:
            raise StoreError(f"journal {self.root}: got quantum {quantum} of {trajectory_id}; quanta count from 0")
        return f"{self.root}/{trajectory_id}.{quantum:04d}.rec"

    def _load(self, path: str) -> bytes | None:
        name = path[len(self.root) + 1 :]
        try:
            if self.one_machine:
                return self._load_here(path, name)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                identity = os.pread(descriptor, _IDENTITY_BYTES, 0)
                with self._lock:
                    return _record(descriptor, name, self._index(identity))
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{path}: cannot read: {error.strerror}") from error

    def _load_here(self, path: str, name: str) -> bytes:
        file = os.stat(path)
        with self._lock:
            descriptor = -1
            if (file.st_dev, file.st_ino) not in self._indexes:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                file = os.fstat(descriptor)
            index = self._index((file.st_dev, file.st_ino))
            if index.descriptor is None:
                index.descriptor = descriptor
            elif descriptor >= 0:  # the name now belongs to a log that is already open
                os.close(descriptor)
            return _record(index.descriptor, name, index)

    def _index(self, log: bytes | tuple[int, int]) -> _Index:
        index = self._indexes.pop(log, None) or _Index()
        self._indexes[log] = index
        self._lookups = index.used = self._lookups + 1
        oldest = next(iter(self._indexes.values()))
        if len(self._indexes) > KEPT_INDEXES or oldest.used < self._lookups - KEPT_LOOKUPS:
            self._indexes.popitem(last=False)
            if oldest.descriptor is not None:
                os.close(oldest.descriptor)
        return index

    def close(self) -> None:
        """Remove the log's own name, and close all files; the journal can still be used."""
        with self._lock:
            self._close_log()
            for index in self._indexes.values():
                if index.descriptor is not None:
                    os.close(index.descriptor)
            self._indexes.clear()


def _record(descriptor: int, name: str, index: _Index) -> bytes:
    if (place := index.places.get(name)) is not None:
        return os.pread(descriptor, place[1], place[0])
    step = _READ_BYTES
    while True:  # bytes after the record need not be read
        begin, data = index.end, os.pread(descriptor, step, index.end)
        if (place := _found(data, name, index)) is not None:
            return data[place[0] - begin : place[0] - begin + place[1]]
        if step >= os.fstat(descriptor).st_size - index.end:
            return b""
        step *= 4


def _found(data: bytes, name: str, index: _Index) -> tuple[int, int] | None:
    """Place of record ``name`` in ``data``, the log from ``index.end`` on; None if it is not there.
    This record and those before it are committed and indexed; bytes after it may be overwritten."""
    seen: dict[str, tuple[int, int]] = {}
    at = 0
    while at + _FRAME.size <= len(data):
        name_bytes, record_bytes = _FRAME.unpack_from(data, at)
        body = at + _FRAME.size + name_bytes
        at = body + record_bytes
        if at > len(data):
            return None
        found = data[body - name_bytes : body].decode(errors="replace")
        seen[found] = (index.end + body, record_bytes)
        if found == name:
            index.places |= seen
            index.end += at
            return seen[name]
    return None


def sweep_logs(root: Path) -> None:
    """Remove the own names of all logs before a run is resumed; records' names keep them."""
    for path in root.glob(f"{LOG_PREFIX}*"):
        path.unlink(missing_ok=True)
