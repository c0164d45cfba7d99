"""Repairs the zarr store of a run: metadata from its record, damaged rows from group records, everything else as it is.

The digests (`libra.store.row_digests`) show for every column and append whether its rows are sound. Only damaged columns
are rebuilt, from the records of the groups that were appended; their digests then say whether they are what was first
written.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.driver.damage import Repairs
from libra.driver.file_checks import RunCheck
from libra.errors import StoreError
from libra.store.row_digests import (
    COMMITTED,
    ISOLATION,
    LEVEL,
    PATHS,
    AppendedRows,
    StoreRecord,
    column_digest,
    column_rows,
    committed_if_readable,
    committed_rows,
    digests_path,
    metadata_faults,
    read_record,
    root_attributes,
    store_faults,
    unsound_appends,
)
from libra.store.run_records import read_batch_facts, read_group
from libra.store.trajectory_store import TrajectoryStore
from libra.store.zarr_layout import COLUMNS, COUNTS, LEVELS, Level, Rows, array_path, num_rows, rows_of
from libra.types import Trajectory
from libra.worker.run_spec import RunDirectory
from libra.worker.training.batch_rows import members_of

_NEW = ".repaired"


def repair_store(check: RunCheck, repairs: Repairs) -> None:
    """Repair the store, or report what is missing for that."""
    store = check.files.store_path
    made = store.with_name(f"{store.name}{_NEW}")
    if not store.exists() and made.exists() and not store_faults(made):  # a repair was killed while it exchanged them
        _exchange(store, made, repairs)
        return
    try:
        record = read_record(store)
    except StoreError:
        try:
            appends = list(_appends_by_rows(store, check.files))
        except StoreError as error:
            repairs.cannot(store.name, f"{error}; restore it from a copy of the run")
            return
        _rebuild(check, repairs, appends, None)
        return
    _restore_metadata(store, record, repairs)
    committed = committed_rows(store)
    appends = [each for each in record.appends if all(each.stop[level] <= committed[level] for level in LEVELS)]
    unsound = {path: bad for path in PATHS if (bad := unsound_appends(store, path, appends))}
    if unsound:
        _rebuild(check, repairs, appends, record, unsound)


def trajectories_of(files: RunDirectory, append: AppendedRows) -> list[Trajectory]:
    """The trajectories of an append, from group records; StoreError if one is gone or damaged."""
    found = recorded(files, append.batch, append.version)
    rows = append.stop["trajectory"] - append.first["trajectory"]
    if len(found) != rows:
        raise StoreError(f"{len(found)} of {rows} trajectories of {_subject(append)} are in group records")
    return found


def recorded(files: RunDirectory, batch: int, version: int) -> list[Trajectory]:
    """The trajectories of a batch, or with ``batch`` -1 of the evaluation of a version, as group records and scores of a teacher
    have them; StoreError if one is gone or damaged."""
    if batch < 0:
        paths = sorted(files.groups_dir.glob(f"eval-{version:06d}-*.group"))
        return [member for path in paths for member in read_group(path)]
    return members_of({"members": read_batch_facts(files.batches_dir, batch)["groups"]}, files.groups_dir)


def _restore_metadata(store: Path, record: StoreRecord, repairs: Repairs) -> None:
    last = record.appends[-1].stop if record.appends else dict.fromkeys(LEVELS, 0)
    faults = dict(metadata_faults(store, record))
    damaged = [name for name in faults if name != "zarr.json"]
    asides = []
    for name in damaged:
        path = name.removesuffix("/zarr.json")
        metadata = dict(record.metadata[path])
        if path in LEVEL:
            metadata["shape"] = [last[LEVEL[path]]]
        asides.append(_replace(store, name, metadata, repairs))
    if damaged:
        _say(store, repairs, damaged, asides)
    stops = [dict.fromkeys(LEVELS, 0), *(each.stop for each in record.appends)]
    committed = committed_if_readable(store)
    if committed in stops and "zarr.json" not in faults:
        return
    if committed is None or committed not in stops:
        committed = _last_whole(store, record)
    counts = {COUNTS[level]: committed[level] for level in LEVELS}
    root = {
        "attributes": {**_isolation(store), **record.attributes, COMMITTED: counts},
        "zarr_format": 3,
        "node_type": "group",
    }
    _say(store, repairs, ["zarr.json"], [_replace(store, "zarr.json", root, repairs)])


def _last_whole(store: Path, record: StoreRecord) -> dict[Level, int]:
    """The end of the last append that left rows: one that was not committed is whole by its digests, or has none."""
    for append in reversed(record.appends):
        if any(not unsound_appends(store, path, [append]) for path in PATHS):
            return append.stop
    return dict.fromkeys(LEVELS, 0)


def _replace(store: Path, name: str, content: dict[str, Any], repairs: Repairs) -> str:
    aside = repairs.set_aside(f"{store.name}/{name}")
    path = store / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))
    return aside


def _say(store: Path, repairs: Repairs, names: list[str], asides: list[str]) -> None:
    which = ", ".join(names) if len(names) <= 3 else f"{len(names)} files zarr.json"
    old = ", ".join(aside for aside in asides if aside)
    repairs.done(
        f"{store.name}/{which}: made again from {digests_path(store).name}{old and f'; what was there is {old}'}"
    )


def _rebuild(
    check: RunCheck,
    repairs: Repairs,
    appends: list[AppendedRows],
    record: StoreRecord | None,
    unsound: dict[str, list[AppendedRows]] | None = None,
) -> None:
    store, files = check.files.store_path, check.files
    made = store.with_name(f"{store.name}{_NEW}")
    shutil.rmtree(made, ignore_errors=True)  # left by a repair that was killed
    new = TrajectoryStore.create(made, _attributes(store, files, record))
    said, failed = list[str](), False
    try:
        for append in appends:
            if append.stop["trajectory"] > append.first["trajectory"]:
                bad = None if unsound is None else [path for path, all_bad in unsound.items() if append in all_bad]
                rows, text = _rows(store, files, append, bad)
                new.append_rows(rows)
                said += [text] if text else []
    except StoreError as error:
        repairs.cannot(
            store.name,
            f"{error}; group records before the oldest checkpoint are removed. Restore it from a copy of the run",
        )
        failed = True
    finally:
        new.close()
        made.with_name(f"{made.name}.lock").unlink(missing_ok=True)
    if failed:
        shutil.rmtree(made)  # what was begun here
        digests_path(made).unlink(missing_ok=True)
        return
    for text in said:
        repairs.done(f"{store.name}: {text}")
    if record is None:
        repairs.done(
            f"{digests_path(store).name}: made again from the rows, which agree with what group records there are"
        )
    _exchange(store, made, repairs)


def _exchange(store: Path, made: Path, repairs: Repairs) -> None:
    aside = [repairs.set_aside(name) for name in (digests_path(store).name, store.name)]
    if digests_path(made).exists():
        digests_path(made).rename(digests_path(store))
    made.rename(store)
    old = " and ".join(name for name in aside if name)
    repairs.done(f"{store.name}: written again{old and f'; what was there is {old}'}")


def _rows(store: Path, files: RunDirectory, append: AppendedRows, bad: list[str] | None) -> tuple[Rows, str]:
    """The rows of one append, and a text of the rebuilt ones; without ``bad``, columns that group records contradict."""
    read = {path: column_rows(store, path, append.first[LEVEL[path]], append.stop[LEVEL[path]]) for path in PATHS}
    made: Rows | None = None
    try:
        if bad is None or bad:
            made = rows_of(trajectories_of(files, append), first=append.first, batch=append.batch)
    except StoreError:
        if bad or any(values is None for values in read.values()):
            raise
    if bad is None:  # nothing proves the rows but group records
        bad = [path for path, values in read.items() if made is not None and _differs(values, made, path)]
    rows: Rows = {}
    other = []
    for level in LEVELS:
        rows[level] = {}
        for column in COLUMNS[level]:
            path = array_path(level, column.name)
            values = read[path]
            if made is not None and (path in bad or values is None):
                values = made[level][column.name]
                if append.digests and column_digest(values) != append.digests[path]:
                    other.append(path)
            assert values is not None
            rows[level][column.name] = values
    which = ", ".join(bad) if len(bad) < len(PATHS) // 2 else f"{len(bad)} columns"
    text = f"{_subject(append)}: {which} from group records" if bad else ""
    if other:
        text += f"; {', '.join(other)} not as first written (the group was graded again)"
    return rows, text


def _differs(values: NDArray[Any] | None, made: Rows, path: str) -> bool:
    other = made[LEVEL[path]][path.rpartition("/")[2]]
    return values is None or column_digest(values) != column_digest(other)


def _appends_by_rows(store: Path, files: RunDirectory) -> Iterator[AppendedRows]:
    """Appends of a store without a record: rows of one batch or one evaluation, by the store, or else by batches and records."""
    committed, names = committed_if_readable(store), ("batch", "iteration", *_OFFSETS.values())
    known: dict[str, Any] = {
        name: None if committed is None else column_rows(store, f"trajectory/{name}", 0, committed["trajectory"])
        for name in names
    }
    if committed is None or any(values is None for values in known.values()):
        yield from _appends_by_records(files)
        return
    rows = len(known["batch"])
    kind = np.where(known["batch"] >= 0, known["batch"], -1 - known["iteration"])
    cuts = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), rows] if rows else []
    for begin, end in itertools.pairwise(cuts):
        first, stop = (
            {level: row if level == "trajectory" else _offset(known, level, row, committed) for level in LEVELS}
            for row in (begin, end)
        )
        yield AppendedRows(first, stop, int(known["batch"][begin]), int(known["iteration"][begin]), {})


_OFFSETS: dict[Level, str] = {
    "token": "offset",
    "turn": "turn_offset",
    "score": "score_offset",
    "route": "route_offset",
}
"""The column with the start of a trajectory in each other level."""


def _offset(columns: dict[str, Any], level: Level, row: int, committed: dict[Level, int]) -> int:
    """Where trajectory ``row`` begins in a level; of the one after the last the number of rows there."""
    offsets = columns[_OFFSETS[level]]
    return int(offsets[row]) if row < len(offsets) else committed[level]


def _appends_by_records(files: RunDirectory) -> Iterator[AppendedRows]:
    at: dict[Level, int] = dict.fromkeys(LEVELS, 0)
    evaluations = {int(path.stem.split("-")[1]) for path in files.evaluations_dir.glob("version-*.json")}
    batches = {int(path.stem.split("-")[1]) for path in files.batches_dir.glob("batch-*.json")}
    for number in range(max([*evaluations, *batches], default=-1) + 1):
        for batch, present in ((-1, evaluations), (number, batches)):
            if number in present:
                append = AppendedRows(at, at, batch, number, {})
                counts = num_rows(recorded(files, batch, number))
                if not counts["trajectory"]:
                    raise StoreError(f"no group record of {_subject(append)} is there")
                stop: dict[Level, int] = {level: at[level] + counts[level] for level in LEVELS}
                yield AppendedRows(at, stop, batch, number, {})
                at = stop


def _attributes(store: Path, files: RunDirectory, record: StoreRecord | None) -> dict[str, Any]:
    if record is not None:
        found = {**_isolation(store), **record.attributes}
    elif not (found := root_attributes(store)):
        from libra.config.load import load_resumed

        config = load_resumed(files.directory)
        found = {"run": config.run.name, "model": config.model.path}
    return {name: value for name, value in found.items() if name not in ("schema", COMMITTED)}


def _isolation(store: Path) -> dict[str, Any]:
    noted = root_attributes(store).get(ISOLATION)
    return {ISOLATION: noted} if isinstance(noted, list) else {}


def _subject(append: AppendedRows) -> str:
    return f"batch {append.batch}" if append.batch >= 0 else f"the evaluation of version {append.version}"
