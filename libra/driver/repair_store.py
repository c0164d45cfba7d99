"""Repairs a run's zarr store: metadata from its digests, damaged rows from group records.

The digests (`libra.store.row_digests`) show for every column and append whether its rows are
intact. Only damaged columns are rebuilt, from records of the appended groups.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from libra.driver.damage import quarantine
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
from libra.store.zarr_layout import COLUMNS, COUNTS, LEVELS, OFFSETS, Level, Rows, array_path, rows_of
from libra.types import Trajectory
from libra.worker.run_spec import RunDirectory
from libra.worker.training.batch_rows import members_of


def repair_store(files: RunDirectory, done: Callable[[str], None]) -> None:
    """Repair the store; ``done`` gets a line per repair. Raises StoreError if rows have no copy."""
    store = files.store_path
    made = store.with_name(f"{store.name}.repaired")
    if not store.exists() and made.exists() and not store_faults(made):  # a repair was killed while it exchanged them
        _exchange(store, made, done)
        return
    try:
        record = read_record(store)
    except StoreError:
        attributes, appends, unsound = root_attributes(store), _appends_by_rows(store), dict[str, list[AppendedRows]]()
        done(f"{digests_path(store).name}: made again from the rows")
    else:
        _restore_metadata(store, record, done)
        attributes, committed = {**_isolation(store), **record.attributes}, committed_rows(store)
        appends = [each for each in record.appends if all(each.stop[level] <= committed[level] for level in LEVELS)]
        unsound = {path: bad for path in PATHS if (bad := unsound_appends(store, path, appends))}
        if not unsound:
            return
    facts = {name: value for name, value in attributes.items() if name not in ("schema", COMMITTED)}
    try:
        _write_again(files, made, facts, appends, unsound, done)
    except StoreError as error:
        shutil.rmtree(made)
        digests_path(made).unlink(missing_ok=True)
        raise StoreError(
            f"{error}; group records before the oldest checkpoint are removed. Restore it from a copy of the run"
        ) from error
    _exchange(store, made, done)


def _restore_metadata(store: Path, record: StoreRecord, done: Callable[[str], None]) -> None:
    last = record.appends[-1].stop if record.appends else dict.fromkeys(LEVELS, 0)
    faults = [name for name, _ in metadata_faults(store, record)]
    contents: dict[str, dict[str, Any]] = {}
    for name in faults:
        if (path := name.removesuffix("/zarr.json")) in record.metadata:
            shape = {"shape": [last[LEVEL[path]]]} if path in LEVEL else {}
            contents[name] = record.metadata[path] | shape
    committed, stops = committed_if_readable(store), [dict.fromkeys(LEVELS, 0), *(each.stop for each in record.appends)]
    if committed not in stops or "zarr.json" in faults:
        counts = {COUNTS[level]: number for level, number in (committed or {}).items()}
        root = {"zarr_format": 3, "node_type": "group"}
        contents["zarr.json"] = root | {"attributes": {**_isolation(store), **record.attributes, COMMITTED: counts}}
    asides = []
    for name, content in contents.items():
        asides.append(quarantine(store.parent, f"{store.name}/{name}"))
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        if name == "zarr.json" and committed not in stops:  # after the arrays, whose rows tell
            whole = _last_whole(store, record)
            content["attributes"][COMMITTED] = {COUNTS[level]: whole[level] for level in LEVELS}
        (store / name).write_text(json.dumps(content, indent=2))
    if contents:
        which = ", ".join(contents) if len(contents) <= 3 else f"{len(contents)} files zarr.json"
        old = ", ".join(filter(None, asides))
        done(f"{store.name}/{which}: made again from {digests_path(store).name}{old and f'; the old ones are {old}'}")


def _last_whole(store: Path, record: StoreRecord) -> dict[Level, int]:
    for append in reversed(record.appends):
        if any(not unsound_appends(store, path, [append]) for path in PATHS):
            return append.stop
    return dict.fromkeys(LEVELS, 0)


def _write_again(
    files: RunDirectory,
    made: Path,
    attributes: dict[str, Any],
    appends: Sequence[AppendedRows],
    unsound: Mapping[str, list[AppendedRows]],
    done: Callable[[str], None],
) -> None:
    shutil.rmtree(made, ignore_errors=True)  # left by a repair that was killed
    try:
        with TrajectoryStore.create(made, attributes) as new:
            for append in appends:
                bad = [path for path, all_bad in unsound.items() if append in all_bad]
                new.append_rows(_rows(files, append, bad, done))
    finally:
        made.with_name(f"{made.name}.lock").unlink(missing_ok=True)


def _exchange(store: Path, made: Path, done: Callable[[str], None]) -> None:
    asides = [quarantine(store.parent, name) for name in (digests_path(store).name, store.name)]
    if digests_path(made).exists():
        digests_path(made).rename(digests_path(store))
    made.rename(store)
    old = " and ".join(filter(None, asides))
    done(f"{store.name}: written again{old and f'; the old one is {old}'}")


def _rows(files: RunDirectory, append: AppendedRows, bad: Sequence[str], done: Callable[[str], None]) -> Rows:
    store = files.store_path
    read = {
        path: None if path in bad else column_rows(store, path, append.first[LEVEL[path]], append.stop[LEVEL[path]])
        for path in PATHS
    }
    if unread := [path for path, values in read.items() if values is None]:
        made = rows_of(trajectories_of(files, append), first=append.first, batch=append.batch)
        for path in unread:
            read[path] = made[LEVEL[path]][path.rpartition("/")[2]]
        other = [path for path in unread if append.digests and column_digest(read[path]) != append.digests[path]]  # type: ignore[arg-type]
        which = ", ".join(unread) if len(unread) < len(PATHS) // 2 else f"{len(unread)} columns"
        again = f"; {', '.join(other)} not as first written (the group was graded again)" if other else ""
        done(f"{store.name}: {_subject(append)}: {which} from group records{again}")
    return {
        level: {column.name: read[array_path(level, column.name)] for column in COLUMNS[level]}  # type: ignore[misc]
        for level in LEVELS
    }


def trajectories_of(files: RunDirectory, append: AppendedRows) -> list[Trajectory]:
    """An append's trajectories from group records and teacher scores. Raises StoreError."""
    if append.batch < 0:
        paths = sorted(files.groups_dir.glob(f"eval-{append.version:06d}-*.group"))
        found = [member for path in paths for member in read_group(path)]
    else:
        rows = read_batch_facts(files.batches_dir, append.batch)["groups"]
        try:
            found = members_of({"members": rows}, files.groups_dir)
        except StoreError as error:
            raise StoreError(f"{_subject(append)}: {error}") from error
    if len(found) != append.stop["trajectory"] - append.first["trajectory"]:
        raise StoreError(f"not every trajectory of {_subject(append)} is in group records")
    return found


def _appends_by_rows(store: Path) -> list[AppendedRows]:
    if (committed := committed_if_readable(store)) is None:
        raise StoreError("neither its digests nor its number of rows can be read; restore it from a copy of the run")
    num = committed["trajectory"]
    names = ("batch", "iteration", *OFFSETS.values())
    known = {name: column_rows(store, f"trajectory/{name}", 0, num) for name in names}
    if any(values is None for values in known.values()):
        raise StoreError("neither its digests nor its batches can be read; restore it from a copy of the run")
    columns: dict[str, Any] = known
    kind = np.where(columns["batch"] >= 0, columns["batch"], -1 - columns["iteration"])
    cuts = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), num] if num else []

    def ends(row: int) -> dict[Level, int]:
        others = {level: int(columns[name][row]) if row < num else committed[level] for level, name in OFFSETS.items()}
        return {**others, "trajectory": row}

    return [
        AppendedRows(ends(begin), ends(end), int(columns["batch"][begin]), int(columns["iteration"][begin]), {})
        for begin, end in pairwise(cuts)
    ]


def _isolation(store: Path) -> dict[str, Any]:
    noted = root_attributes(store).get(ISOLATION)
    return {ISOLATION: noted} if isinstance(noted, list) else {}


def _subject(append: AppendedRows) -> str:
    return f"batch {append.batch}" if append.batch >= 0 else f"the evaluation of version {append.version}"
