"""The trajectories of a run in one zarr v3 group: the truth about what was generated, and which step consumed it.

1. One committer: a store is open for appending once at a time (a lock lies beside it, and ends with its process).
2. An append is whole or absent. The ``committed`` attribute is written last, by one atomic rename. Readers see that
   many rows and no more; the next append, or the next opening for append, overwrites what lies behind them.
3. Conservation: each (split, iteration, group, sample) is there at most once.
4. Committed rows never change, and never move.

Plain ``zarr.open_group(path)`` and ``xarray.open_zarr(path, group=...)`` read it. Whoever reads a store that is being
written, or whose committer was killed, cuts the arrays at ``group.attrs["committed"]``.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr import AsyncArray
from zarr.api.asynchronous import open_array

from libra.errors import StoreError
from libra.store.column_file import ColumnFile
from libra.store.committer_lock import CommitterLock
from libra.store.exclusive_files import write_failure
from libra.store.group_records import prompt_from_json
from libra.store.zarr_layout import COLUMNS, LEVELS, SCHEMA, UPGRADES, Level, array_path, create_arrays, rows_of
from libra.types import EndReason, FailureClass, Trajectory, TrajectoryId

logger = logging.getLogger(__name__)

_COUNTS: Mapping[Level, str] = {"token": "tokens", "turn": "turns", "trajectory": "trajectories"}
_T = TypeVar("_T")
Arrays = dict[Level, dict[str, AsyncArray[Any]]]


class TrajectoryStore:
    """A store opened for reading, or by the one committer for appending; made by `create` and `open`.

    Indices count trajectories in the order in which they were appended.
    """

    def __init__(self, path: Path, lock: CommitterLock | None) -> None:
        self.path = path
        self._lock = lock
        self._cache: dict[Level, dict[str, NDArray[Any]]] = {}
        self._load()
        if lock is not None:
            self._files = self._hold_arrays()
            ids = self.columns()
            names = ("iteration", "group", "sample", "split")
            self._seen = {TrajectoryId(*key) for key in zip(*(ids[name].tolist() for name in names), strict=True)}

    @classmethod
    def create(cls, path: str | Path, attributes: Mapping[str, Any] | None = None) -> Self:
        """A new, empty store, open for appending; ``attributes`` are JSON-able facts kept in the root group.

        Raises StoreError where something already lies at ``path``, or the disk is full.
        """
        path = Path(path)
        lock = CommitterLock(path)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            if path.exists():
                raise StoreError(
                    f"{path}: already exists; open it with TrajectoryStore.open(path, mode='a'), or take another path"
                )
            group = zarr.open_group(temporary, mode="w", zarr_format=3)
            create_arrays(group)
            empty = dict.fromkeys(_COUNTS.values(), 0)
            group.update_attributes({**(attributes or {}), "schema": SCHEMA, "committed": empty})
            temporary.rename(path)
            return cls(path, lock)
        except OSError as error:
            lock.release()
            shutil.rmtree(temporary, ignore_errors=True)
            raise error if isinstance(error, StoreError) else write_failure(error, path) from error

    @classmethod
    def open(cls, path: str | Path, mode: Literal["r", "a"] = "r") -> Self:
        """An existing store, for reading (``"r"``) or as its one committer (``"a"``).

        Raises
        ------
        StoreError
            There is no store at ``path``, it has a schema this Libra does not read, or another committer has it open.
        """
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
        """Commit trajectories, all or none, and return their indices.

        Parameters
        ----------
        batch : int or None
            The batch whose step consumed them; None: no step did.

        Raises
        ------
        StoreError
            The store is not open for appending, a trajectory is there already or malformed, or the disk is full.
            Nothing was committed then; the same append may be tried again.
        """
        if self._lock is None:
            raise StoreError(f"{self.path}: open for reading only; type TrajectoryStore.open(path, mode='a')")
        ids = [trajectory.trajectory_id for trajectory in trajectories]
        self._check_new(ids)
        rows = rows_of(trajectories, first=self._committed, batch=-1 if batch is None else batch)
        try:
            for level, columns in rows.items():
                for name, values in columns.items():
                    self._files[level][name].write(values)
            start = self._committed["trajectory"]
            self._commit({level: self._committed[level] + _num_rows(rows[level]) for level in LEVELS})
        except OSError as error:
            raise write_failure(error, self.path) from error
        self._seen.update(ids)
        return range(start, start + len(ids))

    def trajectory(self, index: int) -> Trajectory:
        """One trajectory, with every token and turn; fields that a turn did not have come back as -1, NaN or ""."""
        if not 0 <= index < self.num_trajectories:
            raise StoreError(
                f"{self.path}: got index {index}; there are {self.num_trajectories} trajectories, counted from 0"
            )
        row = {name: values[index].item() for name, values in self.columns().items() if values.dtype.kind != "T"}
        text = {name: str(values[index]) for name, values in self.columns().items() if values.dtype.kind == "T"}
        tokens = self._slice("token", row["offset"], row["length"])
        turns = self._slice("turn", row["turn_offset"], row["num_turns"])
        del turns["trajectory"]
        return Trajectory(
            trajectory_id=TrajectoryId(row["iteration"], row["group"], row["sample"], text["split"]),
            prompt=prompt_from_json(text["prompt_id"], text["prompt_json"]),
            turns=[
                dict(zip(turns, values, strict=True))
                for values in zip(*(v.tolist() for v in turns.values()), strict=True)
            ],
            end_reason=EndReason(text["end_reason"]),
            failure=FailureClass(text["failure"]),
            failure_detail=text["failure_detail"],
            reward=row["reward"],
            advantage=row["advantage"],
            epoch=row["epoch"],
            retried=text["retried"],
            **tokens,
        )

    def columns(self, level: Level = "trajectory") -> dict[str, NDArray[Any]]:
        """Every column of one level, committed rows only; kept until the store changes, so treat it as read-only."""
        if level not in self._cache:
            self._cache[level] = self._slice(level, 0, self._committed[level])
        return self._cache[level]

    def __contains__(self, trajectory_id: TrajectoryId) -> bool:
        """Whether this committer's store has a trajectory; of a store opened for appending."""
        return trajectory_id in self._seen

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
        """What `create` was given, with ``schema`` and ``committed``."""
        return dict(self._group.attrs)

    def refresh(self) -> None:
        """See what the committer has appended since this store was opened for reading."""
        if self._lock is None:
            self._load()

    def close(self) -> None:
        """Let another committer in; a reader has nothing to close."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _load(self) -> None:
        self._group = zarr.open_group(self.path, mode="r" if self._lock is None else "r+", zarr_format=3)
        check_schema(self._group, self.path)
        committed = self._group.attrs["committed"]
        assert isinstance(committed, dict)
        self._committed: dict[Level, int] = {level: int(committed[name]) for level, name in _COUNTS.items()}
        # By name, not by listing the group: a temporary file that a crash left there would be a warning of zarr's.
        names = [(level, column.name) for level in LEVELS for column in COLUMNS[level]]
        opened = _run(open_array(store=self.path, path=array_path(*name), mode="r", zarr_format=3) for name in names)
        self._arrays: Arrays = {level: {} for level in LEVELS}
        for (level, name), array in zip(names, opened, strict=True):
            self._arrays[level][name] = array
        self._cache.clear()
        self._stale = False

    def _check_new(self, ids: Sequence[TrajectoryId]) -> None:
        twice = [str(i) for i, count in Counter(ids).items() if count > 1 or i in self._seen]
        if twice:
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

    def _commit(self, committed: Mapping[Level, int]) -> None:
        self._group.update_attributes({"committed": {_COUNTS[level]: committed[level] for level in LEVELS}})
        for columns in self._files.values():
            for file in columns.values():
                file.accept()
        self._committed = dict(committed)
        self._cache.clear()
        self._stale = True  # the open arrays still have their old lengths

    def _hold_arrays(self) -> dict[Level, dict[str, ColumnFile]]:
        """Take hold of every array; what an append that was killed left behind the committed rows is cut off."""
        lengths = [(a.shape[0], self._committed[level]) for level in LEVELS for a in self._arrays[level].values()]
        if torn := sum(length != committed for length, committed in lengths):
            logger.warning("%s: an append was cut short; its rows are dropped from %d arrays", self.path, torn)
        for partial in self.path.rglob("*.partial"):
            partial.unlink()
        files: dict[Level, dict[str, ColumnFile]] = {}
        for level, arrays in self._arrays.items():
            committed = self._committed[level]
            last_chunk = committed % next(iter(arrays.values())).chunks[0]
            tails = self._slice(level, committed - last_chunk, last_chunk)
            files[level] = {
                name: ColumnFile(self.path / array_path(level, name), committed, tails[name]) for name in arrays
            }
        return files


def check_schema(group: zarr.Group, path: Path) -> None:
    """StoreError unless the store has the schema this Libra reads; says which Libra, or which command, would."""
    schema = group.attrs.get("schema")
    if schema == SCHEMA:
        return
    if not isinstance(schema, int):
        raise StoreError(f"{path}: a zarr group without a schema number; it is no trajectory store of Libra")
    if schema > SCHEMA:
        raise StoreError(
            f"{path}: schema {schema}, this Libra reads up to {SCHEMA}; use the Libra that wrote it, or a newer one"
        )
    raise StoreError(
        f"{path}: schema {schema}, this Libra reads {SCHEMA}; "
        + (
            f"type libra.store.trajectories.upgrade({str(path)!r})"
            if schema in UPGRADES
            else "no upgrade from it is known"
        )
    )


def upgrade(path: str | Path) -> int:
    """Bring a store of an older schema to this one, step by step, in place; returns the schema it had.

    Raises StoreError where a step is not known, or a committer has the store open.
    """
    path = Path(path)
    lock = CommitterLock(path)
    try:
        group = zarr.open_group(path, mode="r+", zarr_format=3)
        found = schema = group.attrs.get("schema")
        while isinstance(schema, int) and schema < SCHEMA and schema in UPGRADES:
            UPGRADES[schema](group)
            schema += 1
            group.update_attributes({"schema": schema})
        check_schema(group, path)
        assert isinstance(found, int)
        return found
    finally:
        lock.release()


def _num_rows(columns: Mapping[str, NDArray[Any]]) -> int:
    return len(next(iter(columns.values())))


async def _get(array: AsyncArray[Any], start: int, stop: int) -> NDArray[Any]:
    return np.asarray(await array.getitem(slice(start, stop)))


def _run(calls: Iterable[Awaitable[_T]]) -> list[_T]:
    """All calls at once, on an event loop of their own, whichever thread or loop this is called from."""

    async def gather() -> list[_T | BaseException]:
        return await asyncio.gather(*calls, return_exceptions=True)

    with ThreadPoolExecutor(1) as thread:
        results = thread.submit(asyncio.run, gather()).result()
    done: list[_T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done
