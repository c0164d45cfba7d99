"""An append-only file of JSON objects, one a line, written by one process.

1. Lines appear in the order of `write_line`, each whole: the buffer goes to the file in one append that ends with a newline.
2. Lines since the last `flush` may be lost with the process.
3. A torn last line (the writer died, the disk was full) is left out and reported by the reader, and cut off by the next
   writer; a bad line anywhere else is an error.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from libra.errors import StoreError
from libra.store.exclusive_files import write_failure

logger = logging.getLogger(__name__)

_TAIL_BYTES = 65536


class LineLog:
    """A buffered appender to ``path``; its directory is made where missing.

    Parameters
    ----------
    buffer_lines : int
        A `flush` happens by itself whenever that many lines wait; 1 writes through.

    Raises
    ------
    StoreError
        The file cannot be opened or written; a full disk is named as such.
    """

    def __init__(self, path: str | Path, *, buffer_lines: int = 512) -> None:
        self.path = Path(path)
        self._buffer_lines = buffer_lines
        self._lines: list[str] = []
        self._closed = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._cut_torn_tail()
        except OSError as error:
            raise write_failure(error, self.path) from error

    def write_line(self, line: str) -> None:
        """Add one line, without its newline."""
        self._lines.append(line)
        if len(self._lines) >= self._buffer_lines:
            self.flush()

    def flush(self) -> None:
        """Hand all buffered lines to the operating system. After an error they are still buffered."""
        if not self._lines:
            return
        if self._closed:
            raise StoreError(f"{self.path}: this log is closed")
        data = ("\n".join(self._lines) + "\n").encode()
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            os.ftruncate(self._descriptor, end)
            raise write_failure(error, self.path) from error
        self._lines.clear()

    def close(self) -> None:
        """Flush and close; closing twice is closing once."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _cut_torn_tail(self) -> None:
        end = keep = os.lseek(self._descriptor, 0, os.SEEK_END)
        while keep > 0:
            start = max(0, keep - _TAIL_BYTES)
            newline = os.pread(self._descriptor, keep - start, start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < end:
            logger.warning("%s: cut a torn last line of %d bytes, left by a writer that died", self.path, end - keep)
            os.ftruncate(self._descriptor, keep)


class LineReader:
    """The objects of a log, one at a time: iterating gives (line number from 1, object).

    Parameters
    ----------
    offset, line : int
        Where to begin: a byte at which a line starts, and that line's number.

    Attributes
    ----------
    torn : str or None
        After the iteration: the torn last line, which was left out; the caller reports it.

    Raises
    ------
    StoreError
        While iterating, with the line's number: the file is missing, or a line but the last is not a JSON object.
    """

    def __init__(self, path: str | Path, *, offset: int = 0, line: int = 1) -> None:
        self.path, self._offset, self._line = Path(path), offset, line
        self.torn: str | None = None

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, _, line in self.raw():
            yield number, _parsed(line, f"{self.path}, line {number}")

    def raw(self) -> Iterator[tuple[int, int, bytes]]:
        """Line number, offset and bytes of each whole line."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                offset = self._offset
                for number, line in enumerate(file, start=self._line):
                    if not line.endswith(b"\n"):
                        self.torn = line.decode(errors="replace")
                        return
                    yield number, offset, line
                    offset += len(line)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot read this log: {error.strerror}") from error


class LoggedLines(NamedTuple):
    """What `read_lines` found: the objects, and the torn last line (None: the log ends cleanly)."""

    objects: list[dict[str, Any]]
    torn: str | None


def read_lines(path: str | Path) -> LoggedLines:
    """All objects of a log in order.

    A last line without its newline is torn: it is returned as ``torn`` and reported by a warning. StoreError, with the
    line's number, where the file is missing or another line is not a JSON object.
    """
    try:
        *lines, rest = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise StoreError(f"{path}: cannot read this log: {error.strerror}") from error
    objects = [_parsed(line, f"{path}, line {number} of {len(lines)}") for number, line in enumerate(lines, start=1)]
    torn = rest.decode(errors="replace") if rest else None
    if torn is not None:
        logger.warning("%s: the last line is torn and was left out: %r", path, torn[:120])
    return LoggedLines(objects, torn)


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise StoreError(f"{where}: not JSON ({error}): {line[:120]!r}") from error
    if not isinstance(value, dict):
        raise StoreError(f"{where}: not a JSON object: {line[:120]!r}")
    return value
