"""Digests of the committer's rows, and the check of a store against them.

``trajectories.zarr.digests`` stands beside the store. Its first line has the attributes of the
store and the metadata of every array. Each further line describes one append: its range of rows,
and a digest of these rows for each column. Each line has a checksum.

1. The line of an append is written before the append is committed. Opening the store for appending
   cuts off the lines of uncommitted appends.
2. A digest covers values, not the bytes of a chunk: chunks change with every append, rows never.
3. The check only reads. It opens arrays one by one; rows of a chunk that zarr cannot read count as
   damaged.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr
from numpy.typing import NDArray

from libra.errors import StoreError
from libra.seals import parsed_json, sealed_text, unseal
from libra.store.exclusive_files import write_all, write_failure
from libra.store.zarr_layout import CHUNK_ROWS, COLUMNS, COUNTS, LEVELS, Level, Rows, array_path

COMMITTED = "committed"
"""The attribute of a store with its numbers of rows; not part of the header."""
ISOLATION = "isolation"
"""The attribute with the sandbox levels; each start may add a level, so it is not part of the
header."""

PATHS = tuple(array_path(level, column.name) for level in LEVELS for column in COLUMNS[level])
"""Every column, in the order of a line's digests."""


def digests_path(store: Path) -> Path:
    """The file with the digests of a store."""
    return store.with_name(f"{store.name}.digests")


def column_digest(values: NDArray[Any]) -> str:
    """Hexadecimal blake2b-64 of some values of a column."""
    state = hashlib.blake2b(digest_size=8)
    if isinstance(values.dtype, np.dtypes.StringDType) or values.dtype.kind == "O":
        texts = [str(text).encode(errors="surrogatepass") for text in values]
        state.update(np.array([len(text) for text in texts], "<i8").tobytes() + b"".join(texts))
    else:
        state.update(np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<"), copy=False)).tobytes())
    return state.hexdigest()


@dataclass(frozen=True, slots=True)
class AppendedRows:
    """One append: its rows by level, ``first`` to ``stop`` - 1, and digests by column path.
    ``batch`` trained on the rows (-1: none); ``version`` is the first trajectory's iteration."""

    first: dict[Level, int]
    stop: dict[Level, int]
    batch: int
    version: int
    digests: dict[str, str]

    @classmethod
    def of(cls, rows: Rows, first: Mapping[Level, int]) -> AppendedRows:
        """The append of ``rows``, at least one trajectory, after ``first`` committed rows."""
        stop = {level: first[level] + len(next(iter(rows[level].values()))) for level in LEVELS}
        digests = {
            array_path(level, name): column_digest(values) for level in LEVELS for name, values in rows[level].items()
        }
        batch, version = (int(rows["trajectory"][name][0]) for name in ("batch", "iteration"))
        return cls(dict(first), stop, batch, version, digests)

    def to_line(self) -> str:
        """The append as one line with a checksum."""
        digests = [self.digests[path] for path in PATHS]
        first, stop = ([rows[level] for level in LEVELS] for rows in (self.first, self.stop))
        return sealed_text(
            {"first": first, "stop": stop, "batch": self.batch, "version": self.version, "digests": digests}
        )


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """The content of a file of digests.

    Attributes
    ----------
    attributes : dict
        Attributes of the store's root, without ``committed``.
    metadata : dict of path to dict
        The ``zarr.json`` of each array and group below the root, arrays without their shape.
    appends : list of AppendedRows
        In order; the last append may be uncommitted.
    begin, ends : int, list of int
        Offset of the first line of ``appends``, and the end of each line, in bytes.
    """

    attributes: dict[str, Any]
    metadata: dict[str, dict[str, Any]]
    appends: list[AppendedRows]
    begin: int
    ends: list[int]


def read_record(store: Path) -> StoreRecord:
    """The digests of a store, without a torn last line; StoreError if damaged or missing."""
    path = digests_path(store)
    try:
        lines = path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        header = unseal(lines[0])
        appends, ends, end = [], [], len(lines[0])
        for line in lines[1:]:
            values, end = unseal(line), end + len(line)
            first, stop = (dict(zip(LEVELS, values[name], strict=True)) for name in ("first", "stop"))
            digests = dict(zip(PATHS, values["digests"], strict=True))
            appends.append(AppendedRows(first, stop, values["batch"], values["version"], digests))
            ends.append(end)
        return StoreRecord(header["attributes"], header["metadata"], appends, len(lines[0]), ends)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise StoreError(f"{path}: torn or altered ({error})") from error


def metadata_of(store: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The root's constant attributes, and every ``zarr.json`` below it, arrays without shape."""
    attributes = parsed_json((store / "zarr.json").read_bytes())["attributes"]
    for name in (COMMITTED, ISOLATION):
        attributes.pop(name, None)
    metadata = {}
    for name in (*PATHS, *(level for level in LEVELS if level != "token")):
        metadata[name] = parsed_json((store / name / "zarr.json").read_bytes())
        metadata[name].pop("shape", None)
    return attributes, metadata


def begin_record(store: Path) -> None:
    """Write the first line for an empty store, whose name may still change."""
    attributes, metadata = metadata_of(store)
    header = sealed_text({"attributes": attributes, "metadata": metadata})
    digests_path(store).write_text(header + "\n")


class DigestLog:
    """The digests of a store that is open for appending. Raises StoreError if the file is missing
    or altered, or does not cover the committed rows."""

    def __init__(self, store: Path, committed: Mapping[Level, int]) -> None:
        self._path = digests_path(store)
        record = read_record(store)
        ends = [
            (dict.fromkeys(LEVELS, 0), record.begin),
            *zip([a.stop for a in record.appends], record.ends, strict=True),
        ]
        end = next((end for stop, end in reversed(ends) if stop == committed), None)
        if end is None:
            raise StoreError(f"{store}: {dict(committed)} rows are committed, its digests are of {ends[-1][0]}")
        self._end = self._written = end
        os.truncate(self._path, end)

    def write(self, rows: Rows, first: Mapping[Level, int]) -> None:
        """Write the line of an append, over an uncommitted line; `accept` keeps it."""
        data = (AppendedRows.of(rows, first).to_line() + "\n").encode()
        try:
            with self._path.open("r+b", buffering=0) as file:
                file.truncate(self._end)
                write_all(file.fileno(), data, self._end)
        except OSError as error:
            raise write_failure(error, self._path) from error
        self._written = self._end + len(data)

    def accept(self) -> None:
        """Keep the line of the last `write`."""
        self._end = self._written


ROW_BYTES = 20
"""Approximate size of a token in all columns."""

COLUMN = {array_path(level, column.name): column for level in LEVELS for column in COLUMNS[level]}
LEVEL: dict[str, Level] = {array_path(level, column.name): level for level in LEVELS for column in COLUMNS[level]}


class StoreFault(NamedTuple):
    """A damaged file, relative to the store's parent, and its damage."""

    name: str
    what: str


def store_faults(store: Path, limit_bytes: int | None = None) -> list[StoreFault]:
    """The damage of a store; rows are checked only if the metadata is sound. ``limit_bytes`` is how
    much of the newest rows to read, about; None for all rows."""
    before = committed_if_readable(store)  # before the digests: a commit in between adds to both
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
    """Path within the store and damage of each ``zarr.json`` that differs from ``record``."""
    committed, root = committed_if_readable(store), _root(store)
    attributes = {name: value for name, value in root_attributes(store).items() if name not in (COMMITTED, ISOLATION)}
    as_written = {"zarr_format": 3, "node_type": "group"}.items() <= root.items() and attributes == record.attributes
    if committed is None:
        yield "zarr.json", _unreadable(store / "zarr.json")
    elif not as_written:
        yield "zarr.json", "its content was altered"
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


def committed_if_readable(store: Path) -> dict[Level, int] | None:
    """The result of `committed_rows`, or None if the root is damaged."""
    try:
        return committed_rows(store)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def committed_rows(store: Path) -> dict[Level, int]:
    """The committed rows of each level. A damaged root raises any error of reading JSON."""
    counts = parsed_json((store / "zarr.json").read_bytes())["attributes"][COMMITTED]
    return {level: int(counts[name]) for level, name in COUNTS.items()}


def unsound_appends(store: Path, path: str, appends: Iterable[AppendedRows]) -> list[AppendedRows]:
    """The appends whose rows of column ``path`` differ from the digests."""
    level = LEVEL[path]
    blocks = groupby(appends, key=lambda append: append.first[level] // (4 * CHUNK_ROWS[level]))
    return [append for _, block in blocks for append in _unsound_of_block(store, path, list(block))]


def _unsound_of_block(store: Path, path: str, block: Sequence[AppendedRows]) -> Sequence[AppendedRows]:
    level = LEVEL[path]
    first, stop = block[0].first[level], block[-1].stop[level]
    values = column_rows(store, path, first, stop)
    if values is not None:
        rows = ((each, values[each.first[level] - first : each.stop[level] - first]) for each in block)
        return [each for each, found in rows if column_digest(found) != each.digests[path]]
    return block if len(block) == 1 else [each for one in block for each in _unsound_of_block(store, path, [one])]


def column_rows(store: Path, path: str, first: int, stop: int) -> NDArray[Any] | None:
    """Some rows of a column; None if zarr cannot read them."""
    try:
        array: Any = zarr.open_array(store / path, mode="r", zarr_format=3)
        values = np.asarray(array[first:stop])
        return values.astype(COLUMN[path].numpy_dtype()) if len(values) == stop - first else None
    except Exception:  # noqa: BLE001 - the boundary to codecs, which raise anything on damaged bytes
        return None


def root_attributes(store: Path) -> dict[str, Any]:
    """Attributes of the root of a store; empty if the root is damaged."""
    found = _root(store).get("attributes")
    return found if isinstance(found, dict) else {}


def _root(store: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        root = parsed_json((store / "zarr.json").read_bytes())
        return root if isinstance(root, dict) else {}
    return {}


def _unreadable(path: Path) -> str:
    try:
        parsed_json(path.read_bytes())
    except FileNotFoundError:
        return "it is gone"
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"
    return "its content was altered"
