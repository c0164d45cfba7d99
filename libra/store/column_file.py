"""One array of the store on a POSIX file system, appended to without reading it back.

zarr's own ``resize`` and item assignment cost two renames per array, and a store has forty arrays.
Here the rows of the last chunk stay in memory, and numbers are appended to their chunk in place.
The result is plain zarr v3.

1. Bytes of committed rows are never overwritten in place: an uncompressed chunk is extended, and a
   compressed chunk is replaced by an atomic rename.
2. The length in ``zarr.json`` is a field of fixed width, changed by one small write after the rows
   are written.
3. `write` may be repeated, with the same or other rows, until `accept` commits the rows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs.vlen import VLenUTF8
from numcodecs.zstd import Zstd
from numpy.typing import NDArray

from libra.seals import parsed_json
from libra.store.exclusive_files import replace_file, write_all

_WIDTH = 20  # digits of the largest length


class ColumnFile:
    """A one-dimensional array that the committer appends to.

    Parameters
    ----------
    directory : Path
        Directory of the array, as `libra.store.zarr_layout.create_arrays` created it.
    compressed : bool
        Whether the chunks are compressed; text always is.
    committed : int
        Number of rows to keep; later rows are cut off.
    tail : array
        The committed rows in the last, unfinished chunk.
    """

    def __init__(self, directory: Path, compressed: bool, committed: int, tail: NDArray[Any]) -> None:
        self._directory, self._compressed = directory, compressed
        self._metadata = parsed_json((directory / "zarr.json").read_bytes())
        (self._rows_per_chunk,) = self._metadata["chunk_grid"]["configuration"]["chunk_shape"]
        self._text = isinstance(tail.dtype, np.dtypes.StringDType)
        self._committed = self._written = committed
        self._tail = self._next_tail = tail
        (directory / "c").mkdir(exist_ok=True)
        self._make_length_field(committed)

    def write(self, values: NDArray[Any]) -> None:
        """Write rows after the committed rows, over unaccepted rows. OSError on a full disk."""
        rows = np.concatenate([self._tail, values])
        first = self._committed // self._rows_per_chunk
        done = len(self._tail)
        for number in range(-(-len(rows) // self._rows_per_chunk)):
            chunk = rows[number * self._rows_per_chunk : (number + 1) * self._rows_per_chunk]
            if self._compressed:
                self._replace_chunk(first + number, chunk)
            else:
                self._extend_chunk(first + number, chunk, done)
            done = 0
        self._written = self._committed + len(values)
        self._next_tail = rows[len(rows) - self._written % self._rows_per_chunk :]
        self._set_length(self._written)

    def accept(self) -> None:
        """Commit the rows of the last `write`."""
        self._committed, self._tail = self._written, self._next_tail

    def _replace_chunk(self, number: int, rows: NDArray[Any]) -> None:
        full = np.full(self._rows_per_chunk, "" if self._text else 0, object if self._text else rows.dtype)
        full[: len(rows)] = rows
        data = VLenUTF8().encode(full) if self._text else full
        replace_file(self._directory / "c" / str(number), Zstd(level=0).encode(data))

    def _extend_chunk(self, number: int, rows: NDArray[Any], done: int) -> None:
        little = rows.astype(rows.dtype.newbyteorder("<"), copy=False)
        path = self._directory / "c" / str(number)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = self._rows_per_chunk * rows.dtype.itemsize
            if os.fstat(descriptor).st_size != size:
                done = 0  # a new chunk, or a chunk that zarr skipped because it had only fill values
                os.ftruncate(descriptor, size)
            write_all(descriptor, little[done:].tobytes(), done * rows.dtype.itemsize)
        finally:
            os.close(descriptor)

    def _make_length_field(self, length: int) -> None:
        text = json.dumps({**self._metadata, "shape": []}, indent=2)
        before, after = text.split('"shape": []')
        self._length_at = len(before.encode()) + len('"shape": [')
        replace_file(self._directory / "zarr.json", f'{before}"shape": [{length:<{_WIDTH}}]{after}'.encode())

    def _set_length(self, length: int) -> None:
        descriptor = os.open(self._directory / "zarr.json", os.O_WRONLY | os.O_CLOEXEC)
        try:
            write_all(descriptor, f"{length:<{_WIDTH}}".encode(), self._length_at)
        finally:
            os.close(descriptor)
