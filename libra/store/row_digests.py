"""Digests of the committer's rows, which show whether a store is damaged and which rows are sound.

``trajectories.zarr.digests`` stands beside the store. Its first line has the store's attributes and the metadata of every array;
each further one an append: its rows, and the digest of those rows of each column. Lines are sealed.

1. The line of an append is written before the append is committed. Opening the store for appending cuts off lines of appends
   that were not.
2. A digest is of values, not of bytes of a chunk: chunks change with every append, rows never.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from libra.errors import StoreError
from libra.seals import parsed_json, sealed_text, unseal
from libra.store.exclusive_files import write_all, write_failure
from libra.store.zarr_layout import COLUMNS, LEVELS, Level, Rows, array_path

COMMITTED = "committed"
"""The attribute of a store that says how many rows there are; it is not part of the header."""
ISOLATION = "isolation"
"""The attribute that lists levels of sandboxes. Each start may add one, so it is not part of the header either."""

PATHS = tuple(array_path(level, column.name) for level in LEVELS for column in COLUMNS[level])
"""Every column, in the order of a line's digests."""


def digests_path(store: Path) -> Path:
    """The file with the digests of a store."""
    return store.with_name(f"{store.name}.digests")


def column_digest(values: NDArray[Any]) -> str:
    """Hexadecimal blake2b-64 of the values of some rows of a column."""
    state = hashlib.blake2b(digest_size=8)
    if isinstance(values.dtype, np.dtypes.StringDType) or values.dtype.kind == "O":
        texts = [str(text).encode(errors="surrogatepass") for text in values]
        state.update(np.array([len(text) for text in texts], "<i8").tobytes() + b"".join(texts))
    else:
        state.update(np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<"), copy=False)).tobytes())
    return state.hexdigest()


@dataclass(frozen=True, slots=True)
class AppendedRows:
    """One append.

    Attributes
    ----------
    first, stop : dict of level to int
        Its rows.
    batch : int
        The batch whose step consumed them; -1: none.
    version : int
        Iteration of its first trajectory: of an evaluation the version.
    digests : dict of column path to str
    """

    first: dict[Level, int]
    stop: dict[Level, int]
    batch: int
    version: int
    digests: dict[str, str]

    @classmethod
    def of(cls, rows: Rows, first: Mapping[Level, int]) -> AppendedRows:
        """The append of ``rows``, at least one trajectory, behind the ``first`` ones."""
        stop = {level: first[level] + len(next(iter(rows[level].values()))) for level in LEVELS}
        digests = {
            array_path(level, name): column_digest(values) for level in LEVELS for name, values in rows[level].items()
        }
        batch, version = (int(rows["trajectory"][name][0]) for name in ("batch", "iteration"))
        return cls(dict(first), stop, batch, version, digests)

    def to_line(self) -> str:
        """One line, sealed."""
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
        Of the store's root, without ``committed``.
    metadata : dict of path to dict
        The ``zarr.json`` of each array and group below the root, arrays without their shape.
    appends : list of AppendedRows
        In order; the last may be of an append that was not committed.
    ends : list of int
        Where each line of ``appends`` ends, in bytes.
    """

    attributes: dict[str, Any]
    metadata: dict[str, dict[str, Any]]
    appends: list[AppendedRows]
    ends: list[int]


def read_record(store: Path) -> StoreRecord:
    """The digests of a store; StoreError if the file is missing or altered. A torn last line is left out."""
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
        return StoreRecord(header["attributes"], header["metadata"], appends, ends)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise StoreError(f"{path}: torn or altered ({error})") from error


def metadata_of(store: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Attributes of a store's root that never change, and every ``zarr.json`` below it; arrays without their shape."""
    attributes = parsed_json((store / "zarr.json").read_bytes())["attributes"]
    for name in (COMMITTED, ISOLATION):
        attributes.pop(name, None)
    metadata = {}
    for name in (*PATHS, *(level for level in LEVELS if level != "token")):
        metadata[name] = parsed_json((store / name / "zarr.json").read_bytes())
        metadata[name].pop("shape", None)
    return attributes, metadata


def begin_record(store: Path) -> None:
    """Write the first line for a store that is empty, whose name may still change."""
    attributes, metadata = metadata_of(store)
    header = sealed_text({"attributes": attributes, "metadata": metadata})
    digests_path(store).write_text(header + "\n")


def upgrade_record(store: Path, schema: int) -> None:
    """Bring the digests of a store of an older schema, whose arrays are those of ``schema`` already, to that schema.

    Digests of columns that were there stay as they are; those that are new get digests of their rows. It may be repeated.
    """
    path = digests_path(store)
    header, *lines = (line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n"))
    known = [name for name in unseal(header)["metadata"] if name not in LEVELS]
    arrays: dict[str, Any] = {
        name: zarr.open_array(store / name, mode="r", zarr_format=3)[:] for name in PATHS if name not in known
    }
    attributes, metadata = metadata_of(store)
    found = [sealed_text({"attributes": attributes | {"schema": schema}, "metadata": metadata})]
    for line in lines:
        values = unseal(line)
        first, stop = (dict(zip(LEVELS, [*values[name], 0, 0, 0, 0], strict=False)) for name in ("first", "stop"))
        digests = dict(zip(known, values["digests"], strict=True))
        for level in LEVELS:
            for column in COLUMNS[level]:
                if (name := array_path(level, column.name)) in arrays:
                    rows = arrays[name][first[level] : stop[level]].astype(column.numpy_dtype())
                    digests[name] = column_digest(rows)
        found.append(AppendedRows(first, stop, values["batch"], values["version"], digests).to_line())
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    temporary.write_text("".join(f"{line}\n" for line in found))
    temporary.replace(path)


class DigestLog:
    """The digests of a store that is open for appending.

    Raises StoreError if the file is missing or altered, or has not the committed rows.
    """

    def __init__(self, store: Path, committed: Mapping[Level, int]) -> None:
        self._path = digests_path(store)
        record = read_record(store)
        while record.appends and any(record.appends[-1].stop[level] > committed[level] for level in LEVELS):
            record.appends.pop()
            record.ends.pop()
        reached = record.appends[-1].stop if record.appends else dict.fromkeys(LEVELS, 0)
        if reached != committed:
            raise StoreError(f"{store}: it says {dict(committed)} committed rows, its digests are of {reached}")
        with self._path.open("rb") as file:
            self._end = self._written = record.ends[-1] if record.ends else len(file.readline())
        os.truncate(self._path, self._end)

    def write(self, rows: Rows, first: Mapping[Level, int]) -> None:
        """Write the line of an append, over that of one that was not committed. `accept` keeps it."""
        data = (AppendedRows.of(rows, first).to_line() + "\n").encode()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, self._end)
            write_all(descriptor, data, self._end)
        except OSError as error:
            raise write_failure(error, self._path) from error
        finally:
            os.close(descriptor)
        self._written = self._end + len(data)

    def accept(self) -> None:
        """Keep the line of the last `write`."""
        self._end = self._written
