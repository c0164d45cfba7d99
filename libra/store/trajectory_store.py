"""The store of a run: its trajectories in one zarr v3 group, with the batch that consumed each.

1. A store has at most one committer, under a lock that ends with its process.
2. An append is whole or absent. The ``committed`` attribute is written last, by one atomic rename.
   Readers see that many rows; the next append or opening overwrites later rows.
3. Each (split, iteration, group, sample) is stored at most once.
4. Committed rows never change and never move; `libra.store.row_digests` keeps their digests.

Plain ``zarr.open_group(path)`` and ``xarray.open_zarr(path, group=...)`` can read a store. If its
committer is writing or was killed, such readers must cut the arrays at
``group.attrs["committed"]``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr import AsyncArray
from zarr.api.asynchronous import open_array

from libra.errors import StoreError
from libra.store.column_file import ColumnFile
from libra.store.exclusive_files import CommitterLock, write_failure
from libra.store.row_digests import ISOLATION, DigestLog, begin_record, digests_path
from libra.store.run_records import prompt_from_json
from libra.store.zarr_layout import (
    COLUMNS,
    COUNTS,
    LEVELS,
    SCHEMA,
    Level,
    Rows,
    array_path,
    create_arrays,
    is_compressed,
    rows_of,
    taught_of,
)
from libra.types import EndReason, FailureClass, Trajectory, TrajectoryId

logger = logging.getLogger(__name__)


_T = TypeVar("_T")
Arrays = dict[Level, dict[str, AsyncArray[Any]]]


class TrajectoryStore:
    """A store, made by `create` or `open`, for reading or for its committer. Indices count
    trajectories in the order in which they were appended."""

    def __init__(self, path: Path, lock: CommitterLock | None) -> None:
        self.path = path
        self._lock = lock
        self._writing = threading.Lock()
        self._cache: dict[Level, dict[str, NDArray[Any]]] = {}
        self._load()
        if lock is not None:
            self._digests = DigestLog(path, self._committed)
            self._files = self._hold_arrays()
            self._seen = self._stored_ids()

    @classmethod
    def create(cls, path: str | Path, attributes: Mapping[str, Any] | None = None) -> Self:
        """A new, empty store, open for appending; ``attributes`` are JSON-able facts of the root
        group. Raises StoreError if ``path`` exists, or the disk is full."""
        path = Path(path)
        lock = CommitterLock(path)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            if path.exists():
                raise StoreError(
                    f"{path}: exists; open it with TrajectoryStore.open(path, mode='a'), or take another path"
                )
            group = zarr.open_group(temporary, mode="w", zarr_format=3)
            create_arrays(group)
            empty = dict.fromkeys(COUNTS.values(), 0)
            facts = {**(attributes or {}), "schema": SCHEMA}
            group.update_attributes({**facts, "committed": empty})
            begin_record(temporary)
            digests_path(temporary).rename(digests_path(path))
            temporary.rename(path)
            return cls(path, lock)
        except OSError as error:
            lock.release()
            shutil.rmtree(temporary, ignore_errors=True)
            raise error if isinstance(error, StoreError) else write_failure(error, path) from error

    @classmethod
    def open(cls, path: str | Path, mode: Literal["r", "a"] = "r") -> Self:
        """An existing store, for reading (``"r"``) or for its one committer (``"a"``). Raises
        StoreError without a store at ``path``, for another schema, or if it has another
        committer."""
        path = Path(path)
        if mode not in ("r", "a"):
            raise StoreError(f"{path}: got mode {mode!r}; allowed are 'r' (read) and 'a' (the one committer)")
        if not (path / "zarr.json").is_file():
            raise StoreError(
                f"{path}: no trajectory store here; a run keeps its own in <run directory>/trajectories.zarr"
            )
        if mode == "r":
            return cls(path, None)
        lock = CommitterLock(path)
        try:
            return cls(path, lock)
        except BaseException:
            lock.release()
            raise

    def append(self, trajectories: Sequence[Trajectory], *, batch: int | None = None) -> range:
        """Commit trajectories, all or none, and return their indices; ``batch`` trained on them.

        Raises StoreError if the store is not open for appending, a trajectory is already stored or
        malformed, or the disk is full. Nothing is committed then, and the append may be repeated.
        """
        with self._writing:
            self._check_new([trajectory.trajectory_id for trajectory in trajectories])
            return self._append(rows_of(trajectories, first=self._committed, batch=-1 if batch is None else batch))

    def append_rows(self, rows: Rows) -> range:
        """Commit rows of the same position in another store. Raises as `append`."""
        with self._writing:
            self._check_new(_ids(rows["trajectory"]))
            return self._append(rows)

    def _append(self, rows: Rows) -> range:
        ids, start = _ids(rows["trajectory"]), self._committed["trajectory"]
        try:
            for level, columns in rows.items():
                for name, values in columns.items():
                    self._files[level][name].write(values)
            if ids:
                self._digests.write(rows, self._committed)
            self._commit({level: self._committed[level] + len(next(iter(rows[level].values()))) for level in LEVELS})
        except OSError as error:
            raise error if isinstance(error, StoreError) else write_failure(error, self.path) from error
        self._seen.update(ids)
        return range(start, start + len(ids))

    def note_isolation(self, level: str) -> None:
        """Add a level of the sandbox for the model's programs to the attribute ``isolation``.
        Raises StoreError if the attribute cannot be written."""
        self._check_writable()
        noted = self._group.attrs.get(ISOLATION, [])
        assert isinstance(noted, list)
        if level not in noted:
            try:
                self._group.update_attributes({ISOLATION: [*noted, level]})
            except OSError as error:
                raise write_failure(error, self.path) from error

    def trajectory(self, index: int) -> Trajectory:
        """One trajectory, with every token and turn; missing fields of a turn are -1, NaN or ""."""
        if not 0 <= index < self.num_trajectories:
            raise StoreError(
                f"{self.path}: got index {index}; there are {self.num_trajectories} trajectories, counted from 0"
            )
        row = self.row(index)
        tokens = self._slice("token", row["offset"], row["length"])
        turns = self._slice("turn", row["turn_offset"], row["num_turns"])
        del turns["trajectory"]
        taught = routes = None
        if width := row["scores_per_token"]:
            num_actions = int(tokens["is_action"].sum())
            taught = taught_of(self._slice("score", row["score_offset"], width * num_actions), width)
        if layers := row["route_layers"]:
            shape = row["length"], layers, row["experts_per_token"]
            routes = self._slice("route", row["route_offset"], math.prod(shape))["expert"].reshape(shape)
        return Trajectory(
            trajectory_id=TrajectoryId(row["iteration"], row["group"], row["sample"], row["split"]),
            prompt=prompt_from_json(row["prompt_id"], row["prompt_json"]),
            turns=[
                dict(zip(turns, values, strict=True))
                for values in zip(*(v.tolist() for v in turns.values()), strict=True)
            ],
            end_reason=EndReason(row["end_reason"]),
            failure=FailureClass(row["failure"]),
            failure_detail=row["failure_detail"],
            reward=row["reward"],
            advantage=row["advantage"],
            epoch=row["epoch"],
            retried=row["retried"],
            late=None,
            counted=True,
            routes=routes,
            drawn=None,
            taught=taught,
            **tokens,
        )

    def row(self, index: int) -> dict[str, Any]:
        """The trajectory columns of one trajectory, as plain values."""
        return {
            name: str(values[index]) if values.dtype.kind == "T" else values[index].item()
            for name, values in self.columns().items()
        }

    def columns(self, level: Level = "trajectory") -> dict[str, NDArray[Any]]:
        """Every column of one level, committed rows only; cached, so treat it as read-only."""
        if level not in self._cache:
            self._cache[level] = self._slice(level, 0, self._committed[level])
        return self._cache[level]

    def tokens(self, first: int, last: int, names: Sequence[str]) -> list[NDArray[Any]]:
        """Some token columns of trajectories ``first`` to ``last`` - 1, not cached."""
        columns = self.columns()
        if first >= last:
            return [np.zeros(0, array.dtype) for array in (self._arrays["token"][name] for name in names)]
        start, stop = int(columns["offset"][first]), int(columns["offset"][last - 1] + columns["length"][last - 1])
        return _run(_get(self._arrays["token"][name], start, stop) for name in names)

    def __contains__(self, trajectory_id: TrajectoryId) -> bool:
        """Whether a store opened for appending has a trajectory."""
        return trajectory_id in self._seen

    def among(self, ids: Iterable[TrajectoryId]) -> list[TrajectoryId]:
        """The members of ``ids`` that a store opened for appending has."""
        return [each for each in ids if each in self._seen]

    @property
    def num_trajectories(self) -> int:
        """Committed trajectories."""
        return self._committed["trajectory"]

    @property
    def num_turns(self) -> int:
        """Committed turns."""
        return self._committed["turn"]

    @property
    def num_tokens(self) -> int:
        """Committed tokens."""
        return self._committed["token"]

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes given to `create`, with ``schema`` and ``committed``."""
        return dict(self._group.attrs)

    def refresh(self) -> None:
        """Make rows appended since visible to a reader."""
        if self._lock is None:
            self._load()

    def close(self) -> None:
        """Release the committer's lock, after any append in progress in another thread."""
        with self._writing:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self) -> None:
        self._group = zarr.open_group(self.path, mode="r" if self._lock is None else "r+", zarr_format=3)
        if (schema := self._group.attrs.get("schema")) != SCHEMA:
            raise StoreError(
                f"{self.path}: schema {schema}, this Libra reads {SCHEMA}; use the Libra that wrote it, or give the path of a "
                "trajectory store"
            )
        committed = self._group.attrs["committed"]
        assert isinstance(committed, dict)
        self._committed: dict[Level, int] = {level: int(committed[name]) for level, name in COUNTS.items()}
        # By name, not by listing the group: zarr would warn of a temporary file that a crash left.
        names = [(level, column.name) for level in LEVELS for column in COLUMNS[level]]
        opened = _run(open_array(store=self.path, path=array_path(*name), mode="r", zarr_format=3) for name in names)
        self._arrays: Arrays = {level: {} for level in LEVELS}
        for (level, name), array in zip(names, opened, strict=True):
            self._arrays[level][name] = array
        self._cache.clear()
        self._stale = False

    def _check_writable(self) -> None:
        if self._lock is None:
            raise StoreError(f"{self.path}: open for reading only; type TrajectoryStore.open(path, mode='a')")

    def _check_new(self, ids: Sequence[TrajectoryId]) -> None:
        self._check_writable()
        if twice := [str(i) for i, count in Counter(ids).items() if count > 1 or i in self._seen]:
            raise StoreError(
                f"{self.path}: {len(twice)} of {len(ids)} trajectories are there already ({', '.join(twice[:5])}"
                f"{', ...' if len(twice) > 5 else ''}); each (split, iteration, group, sample) is stored once. "
                "Nothing was appended"
            )

    def _slice(self, level: Level, start: int, length: int) -> dict[str, NDArray[Any]]:
        if self._stale:
            self._load()
        arrays = self._arrays[level]
        return dict(zip(arrays, _run(_get(array, start, start + length) for array in arrays.values()), strict=True))

    def _stored_ids(self) -> set[TrajectoryId]:
        arrays, num = self._arrays["trajectory"], self._committed["trajectory"]
        names = ("split", "iteration", "group", "sample")
        columns = _run(_get(arrays[name], 0, num) for name in names)
        return set(_ids(dict(zip(names, columns, strict=True))))

    def _commit(self, committed: Mapping[Level, int]) -> None:
        self._group.update_attributes({"committed": {COUNTS[level]: committed[level] for level in LEVELS}})
        for columns in self._files.values():
            for file in columns.values():
                file.accept()
        self._digests.accept()
        self._committed = dict(committed)
        self._cache.clear()
        self._stale = True  # the open arrays still have their old lengths

    def _hold_arrays(self) -> dict[Level, dict[str, ColumnFile]]:
        lengths = [(a.shape[0], self._committed[level]) for level in LEVELS for a in self._arrays[level].values()]
        if torn := sum(length != committed for length, committed in lengths):
            logger.warning("%s: an append was cut short; its rows were dropped from %d arrays", self.path, torn)
        for partial in self.path.rglob("*.partial"):
            partial.unlink()
        files: dict[Level, dict[str, ColumnFile]] = {}
        for level, arrays in self._arrays.items():
            committed = self._committed[level]
            last_chunk = committed % next(iter(arrays.values())).chunks[0]
            tails = self._slice(level, committed - last_chunk, last_chunk)
            files[level] = {
                column.name: ColumnFile(
                    self.path / array_path(level, column.name),
                    is_compressed(level, column),
                    committed,
                    tails[column.name],
                )
                for column in COLUMNS[level]
            }
        return files


def _ids(rows: Mapping[str, NDArray[Any]]) -> list[TrajectoryId]:
    columns = (rows[name].tolist() for name in ("iteration", "group", "sample", "split"))
    return [TrajectoryId(*key) for key in zip(*columns, strict=True)]


async def _get(array: AsyncArray[Any], start: int, stop: int) -> NDArray[Any]:
    return np.asarray(await array.getitem(slice(start, stop)))


def _run(calls: Iterable[Awaitable[_T]]) -> list[_T]:
    async def gather() -> list[_T]:
        return await asyncio.gather(*calls)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, gather()).result()
