"""Closed parts of a log: files of whole lines that never change, named by their first and last line, compressed with gzip.

``RUN/events.jsonl`` has the newest lines; those before them are in ``RUN/events/FIRST-LAST.jsonl.gz``. All in order, as text:
``zcat -f RUN/events/* RUN/events.jsonl``.

Invariants
----------
1. The segments of a log have its lines from 1 on, each once. A missing one is an error, which names its lines, for those who read
   them; the writer goes on, and what is newer is read.
2. The log's own file always exists. It becomes a segment by a second name, ``FIRST-LAST.jsonl``; then an empty file takes its
   place by a rename. Where a writer dies in between, the file has both names: readers count it once, and the next writer finishes.
3. The compressed form appears by a rename, whole and on the device, before the plain one is removed. Where both exist they are
   equal, and the next writer finishes.
"""

from __future__ import annotations

import gzip
import logging
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

from libra.errors import StoreError
from libra.store.exclusive_files import sync_directory

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<first>\d+)-(?P<last>\d+)\.jsonl(?:\.gz)?")
_CHUNK_BYTES = 1 << 20
_ADVICE = "libra replay --from-snapshot begins after it, and a resumed run needs only the newest part"


class _Target(Protocol):
    def write(self, data: bytes, /) -> int: ...


class Segment(NamedTuple):
    """Lines ``first`` to ``last`` of a log, both included; ``plain`` is its file until ``packed``, the compressed one, exists."""

    first: int
    last: int
    plain: Path

    @property
    def packed(self) -> Path:
        """The compressed file."""
        return self.plain.with_name(self.plain.name + ".gz")

    def lines(self, start: int = 1) -> Iterator[bytes]:
        """Its lines from line ``start`` of the log on; StoreError if the file is damaged."""
        number = max(start, self.first) - 1
        try:
            with self._open() as file:
                for line in islice(file, number + 1 - self.first, self.last - self.first + 1):
                    number += 1
                    yield line
                if isinstance(file, gzip.GzipFile):
                    file.read(1)  # to its end, where its checksum is
        except (OSError, EOFError, zlib.error) as error:
            raise StoreError(f"{self.packed}: this part of a log is damaged ({error}); {_ADVICE}") from error
        if number != self.last:
            raise StoreError(f"{self.packed}: this part of a log ends with line {number}; {_ADVICE}")

    def _open(self) -> gzip.GzipFile | BufferedReader:
        try:
            return gzip.open(self.packed, "rb")
        except FileNotFoundError:
            pass
        try:
            return self.plain.open("rb")
        except FileNotFoundError:  # it was compressed since the first look
            return gzip.open(self.packed, "rb")

    def compress(self) -> None:
        """Replace the plain file by the compressed one; no effect where that is done. Its lines beyond ``last`` are left out.

        Raises OSError if the file cannot be written, StoreError where lines are missing; the plain file stays.
        """
        temporary = self.plain.with_name(f".{self.packed.name}.{os.urandom(6).hex()}.tmp")
        try:
            if not self.packed.exists():
                with self.plain.open("rb") as source, temporary.open("wb") as target:
                    with gzip.GzipFile("", "wb", 6, target, mtime=0) as packed:
                        self._copy(source, packed)
                    target.flush()
                    os.fsync(target.fileno())
                temporary.rename(self.packed)
                sync_directory(self.packed.parent)
            self.plain.unlink(missing_ok=True)
        finally:
            temporary.unlink(missing_ok=True)

    def _copy(self, source: BufferedReader, target: _Target) -> None:
        left = self.last - self.first + 1
        while left:
            chunk = source.read(_CHUNK_BYTES)
            if not chunk:
                raise StoreError(f"{self.plain}: {left} lines are missing at its end; it stays uncompressed")
            count = min(left, chunk.count(b"\n"))
            if count == left:
                chunk = b"".join(line + b"\n" for line in chunk.split(b"\n", left)[:left])
            target.write(chunk)
            left -= count


def segments_directory(log: Path) -> Path:
    """Where the segments of a log are: beside it, under its name without the suffix."""
    return log.with_suffix("")


def segments_of(log: Path) -> list[Segment]:
    """The segments of a log that are there, in order."""
    directory = segments_directory(log)
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(
        {
            Segment(int(match["first"]), int(match["last"]), directory / name.removesuffix(".gz"))
            for name in names
            if (match := _NAME.fullmatch(name))
        }
    )


def check_whole(log: Path, segments: Sequence[Segment]) -> None:
    """StoreError where lines before or between the segments of a log are missing."""
    for first, segment in zip([1, *(each.last + 1 for each in segments)], segments, strict=False):
        if segment.first != first:
            gone = f"lines {first} to {segment.first - 1} of the log are missing"
            raise StoreError(f"{segments_directory(log)}: {gone}; {_ADVICE}")


def remove_partial(log: Path) -> None:
    """Remove the temporary files that a killed writer left."""
    for directory in (log.parent, segments_directory(log)):
        for path in directory.glob(f".*{log.suffix}*.tmp") if directory.is_dir() else ():
            path.unlink(missing_ok=True)


def close_segment(log: Path) -> Segment | None:
    """Give the lines of ``log``, which must end with a newline, to a new segment, and make the log empty; None: it has no line.

    Raises OSError if that is impossible, with the lines where they were.
    """
    count = _count_lines(log)
    if not count:
        return None
    directory = segments_directory(log)
    directory.mkdir(exist_ok=True)
    before = segments_of(log)
    if before and same_file(before[-1].plain, log):  # of a close that was cut short; the log may have grown since
        before.pop().plain.unlink()
    first = before[-1].last + 1 if before else 1
    segment = Segment(first, first + count - 1, directory / f"{first:09d}-{first + count - 1:09d}.jsonl")
    segment.plain.hardlink_to(log)
    empty = directory / f".{log.name}.{os.urandom(6).hex()}.tmp"
    try:
        empty.touch(exist_ok=False)
        empty.rename(log)
    finally:
        empty.unlink(missing_ok=True)
    return segment


def same_file(one: Path, other: Path) -> bool:
    """Whether two names are of one file; False if one does not exist."""
    try:
        return one.samefile(other)
    except FileNotFoundError:
        return False


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""))
