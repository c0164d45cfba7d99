"""Whether a store still has the content that its committer wrote, and otherwise which rows are sound.

Reading only. The store may be damaged in any way: arrays are opened one by one, by the metadata on record
(`libra.store.row_digests`), and whatever zarr raises on a damaged chunk makes those rows unsound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr
from numpy.typing import NDArray

from libra.errors import StoreError
from libra.seals import parsed_json
from libra.store.row_digests import (
    COMMITTED,
    ISOLATION,
    PATHS,
    AppendedRows,
    StoreRecord,
    column_digest,
    digests_path,
    read_record,
)
from libra.store.trajectories import COUNTS, HAS_DIGESTS
from libra.store.zarr_layout import CHUNK_ROWS, COLUMNS, LEVELS, UPGRADES, Level, array_path

ROW_BYTES = 20
"""Of a token in all columns, about."""

COLUMN = {array_path(level, column.name): column for level in LEVELS for column in COLUMNS[level]}
LEVEL: dict[str, Level] = {array_path(level, column.name): level for level in LEVELS for column in COLUMNS[level]}


class StoreFault(NamedTuple):
    """A damaged file, relative to the store's parent, and what is wrong with it."""

    name: str
    what: str


def _committed_if_readable(store: Path) -> dict[Level, int] | None:
    try:
        return committed_rows(store)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def store_faults(store: Path, limit_bytes: int | None = None) -> list[StoreFault]:
    """The damage of a store: metadata first, and rows only if the metadata is sound.

    Parameters
    ----------
    limit_bytes : int or None
        Read about that many bytes of rows, the newest. None: all of them.
    """
    root = _root(store)
    if root is not None and HAS_DIGESTS not in root.get("attributes", {}) and not digests_path(store).exists():
        return []  # of an older Libra
    if root is not None and root["attributes"].get("schema") in UPGRADES:
        return []  # of an older schema: whoever opens it says how to bring it up
    before = _committed_if_readable(store)  # before the digests: a commit in between adds to both
    try:
        record = read_record(store)
    except StoreError as error:
        return [StoreFault(digests_path(store).name, str(error).partition(": ")[2])]
    if faults := [StoreFault(f"{store.name}/{name}", what) for name, what in metadata_faults(store, record)]:
        return faults
    committed = before or committed_rows(store)
    appends = [each for each in record.appends if all(each.stop[level] <= committed[level] for level in LEVELS)]
    if (appends[-1].stop if appends else dict.fromkeys(LEVELS, 0)) != committed:
        return [StoreFault(f"{store.name}/zarr.json", "its number of committed rows was altered")]
    newest = appends
    if limit_bytes is not None:
        newest = [each for each in appends if (committed["token"] - each.first["token"]) * ROW_BYTES <= limit_bytes]
    chunks = [
        f"{store.name}/{path}/c/{append.first[LEVEL[path]] // CHUNK_ROWS[LEVEL[path]]}"
        for path in PATHS
        for append in unsound_appends(store, path, newest)
    ]
    return [StoreFault(name, "altered or gone") for name in dict.fromkeys(chunks)]


def metadata_faults(store: Path, record: StoreRecord) -> Iterator[tuple[str, str]]:
    """Each ``zarr.json`` that is not as on record, relative to the store, and what is wrong with it."""
    try:
        committed: dict[Level, int] | None = committed_rows(store)
        attributes = dict((_root(store) or {})["attributes"])
        attributes.pop(COMMITTED)
        attributes.pop(ISOLATION, None)
        root = _root(store) or {}
        if attributes != record.attributes or root.get("zarr_format") != 3 or root.get("node_type") != "group":
            yield "zarr.json", "its content was altered"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        committed = None
        yield "zarr.json", _unreadable(store / "zarr.json")
    for name, expected in record.metadata.items():
        path = store / name / "zarr.json"
        try:
            found = parsed_json(path.read_bytes())
            shape = found.pop("shape", None)
            if found != expected:
                yield f"{name}/zarr.json", "its content was altered"
            elif name in LEVEL and committed is not None and int(shape[0]) < committed[LEVEL[name]]:
                yield f"{name}/zarr.json", f"its length is {shape[0]}, committed are {committed[LEVEL[name]]} rows"
        except (OSError, ValueError, TypeError, IndexError, KeyError, AttributeError):
            yield f"{name}/zarr.json", _unreadable(path)


def committed_rows(store: Path) -> dict[Level, int]:
    """The committed rows of each level. Raises any error of reading JSON if the root is damaged."""
    counts = parsed_json((store / "zarr.json").read_bytes())["attributes"][COMMITTED]
    return {level: int(counts[name]) for level, name in COUNTS.items()}


def unsound_appends(store: Path, path: str, appends: Sequence[AppendedRows]) -> list[AppendedRows]:
    """The appends whose rows of one column differ from the written ones."""
    level, found, rows_at_once = LEVEL[path], [], 4 * CHUNK_ROWS[LEVEL[path]]
    block: list[AppendedRows] = []
    for number, append in enumerate(appends):
        block.append(append)
        if append.stop[level] - block[0].first[level] < rows_at_once and number + 1 < len(appends):
            continue
        found += _unsound_of_block(store, path, block)
        block = []
    return found


def _unsound_of_block(store: Path, path: str, block: Sequence[AppendedRows]) -> list[AppendedRows]:
    level = LEVEL[path]
    first, stop = block[0].first[level], block[-1].stop[level]
    values = column_rows(store, path, first, stop)
    if values is None:
        return (
            [*block] if len(block) == 1 else [each for one in block for each in _unsound_of_block(store, path, [one])]
        )
    return [
        each
        for each in block
        if column_digest(values[each.first[level] - first : each.stop[level] - first]) != each.digests[path]
    ]


def column_rows(store: Path, path: str, first: int, stop: int) -> NDArray[Any] | None:
    """Some rows of a column; None where zarr cannot read them."""
    try:
        array: Any = zarr.open_array(store / path, mode="r", zarr_format=3)
        values = np.asarray(array[first:stop])
        return values.astype(COLUMN[path].numpy_dtype()) if len(values) == stop - first else None
    except Exception:  # noqa: BLE001 - the boundary to codecs, which raise anything on damaged bytes
        return None


def _root(store: Path) -> dict[str, Any] | None:
    try:
        root = parsed_json((store / "zarr.json").read_bytes())
    except (OSError, ValueError):
        return None
    return root if isinstance(root, dict) and isinstance(root.get("attributes"), dict) else None


def _unreadable(path: Path) -> str:
    if not path.exists():
        return "it is gone"
    try:
        parsed_json(path.read_bytes())
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"
    return "its content was altered"
