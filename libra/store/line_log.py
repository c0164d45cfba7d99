"""An append-only file of JSON objects, one per line, written by one process.

1. Lines appear whole, in the order of `write_line`: each flush is one write that ends with a
   newline.
2. Lines since the last `flush` may be lost with the process.
3. A torn last line (the writer died, the disk was full) is skipped and reported by the reader, and
   cut off by the next writer; a bad line anywhere else is an error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from libra.errors import StoreError
from libra.seals import parsed_json
from libra.store.exclusive_files import write_all, write_failure

logger = logging.getLogger(__name__)

_TAIL_BYTES = 65536


class LineLog:
    """A buffered appender to ``path``; a missing directory is created. Each ``buffer_lines`` lines
    cause a `flush`; 1 writes every line at once. Raises StoreError if the file cannot be opened or
    written; the message names a full disk."""

    def __init__(self, path: str | Path, *, buffer_lines: int = 512) -> None:
        self.path = Path(path)
        self._buffer_lines = buffer_lines
        self._lines: list[str] = []
        self._closed = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open(self.path)
            self._cut_torn_tail()
        except OSError as error:
            raise write_failure(error, self.path) from error

    def write_line(self, line: str) -> None:
        """Add one line, given without its newline."""
        self.write_lines([line])

    def write_lines(self, lines: Iterable[str]) -> None:
        """Add lines, given without newlines."""
        self._lines.extend(lines)
        if len(self._lines) >= self._buffer_lines:
            self.flush()

    def flush(self) -> None:
        """Pass all buffered lines to the operating system; after an error they stay buffered."""
        if not self._lines:
            return
        if self._closed:
            raise StoreError(f"{self.path}: this log is closed")
        data = ("\n".join(self._lines) + "\n").encode()
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        try:
            write_all(self._descriptor, data)
        except OSError as error:
            os.ftruncate(self._descriptor, end)
            raise write_failure(error, self.path) from error
        self._lines.clear()

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _cut_torn_tail(self) -> None:
        end = keep = os.lseek(self._descriptor, 0, os.SEEK_END)
        newline = -1
        while keep > 0 and newline < 0:
            start = max(0, keep - _TAIL_BYTES)
            newline = os.pread(self._descriptor, keep - start, start).rfind(b"\n")
            keep = start + newline + 1
        if keep < end:
            logger.warning("%s: cut off a torn last line of %d bytes", self.path, end - keep)
            os.ftruncate(self._descriptor, keep)


class LineReader:
    """The objects of a log: iteration yields (line number from 1, object).

    Parameters
    ----------
    line : int
        First line to parse.

    Attributes
    ----------
    torn : str or None
        The torn last line, if any; set by the iteration, reported by the caller.

    Raises
    ------
    StoreError
        While iterating: the file is missing, or a line other than the last is not a JSON object.
    """

    def __init__(self, path: str | Path, *, line: int = 1) -> None:
        self.path, self.line = Path(path), line
        self.torn: str | None = None

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return self.with_any(())

    def with_any(self, words: Sequence[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Parse only lines that contain one of ``words``; without words, all lines."""
        for number, line in self.raw():
            if not words or any(word in line for word in words):
                yield number, self._parsed(line, f"{self.path}, line {number}")

    def raw(self) -> Iterator[tuple[int, bytes]]:
        """Number and bytes of each whole line."""
        try:
            with self.path.open("rb") as file:
                yield from self.whole_lines(file, 1)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot read this log: {error.strerror}") from error

    def whole_lines(self, file: BinaryIO, first: int) -> Iterator[tuple[int, bytes]]:
        """Numbers (from ``first`` on) and bytes of the lines of ``file``; sets `torn`."""
        self.torn = None
        for number, line in enumerate(file, first):
            if not line.endswith(b"\n"):
                self.torn = line.decode(errors="replace")
                return
            if number >= self.line:
                yield number, line

    def _parsed(self, line: bytes, where: str) -> dict[str, Any]:
        try:
            value = self._value(line)
        except ValueError as error:
            raise StoreError(f"{where}: not JSON ({error}): {line[:120]!r}; type libra doctor RUN") from error
        if not isinstance(value, dict):
            raise StoreError(f"{where}: not a JSON object: {line[:120]!r}")
        return value

    def _value(self, line: bytes) -> Any:
        return parsed_json(line)

    def warn_if_torn(self) -> None:
        """After the iteration, log a warning if a torn last line was skipped."""
        if self.torn is not None:
            logger.warning("%s: the last line is torn and was skipped: %r", self.path, self.torn[:120])


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """All objects of a log in order; a torn last line causes a warning. Raises as `LineReader`."""
    reader = LineReader(path)
    objects = [value for _, value in reader]
    reader.warn_if_torn()
    return objects
