"""The event log of a run: one of `libra.facts` per line, in order of writing.

``events.jsonl`` has the newest lines. Older lines are in closed segments,
``events/FIRST-LAST.jsonl.gz``, named by their first and last line. The readers here join all parts,
and so does ``zcat -f RUN/events/* RUN/events.jsonl``.

1. Each line is in exactly one file: ``events.jsonl`` becomes a segment by a rename, and an empty
   file takes its place.
2. Lines since the last `flush` may be lost with the process.
3. The segments hold every line from 1 on once. If a segment is missing, its readers raise an error
   that names it; the writer goes on, and newer lines can be read.
4. A compressed segment appears whole, by a rename, before the plain file is removed. If both exist
   they are equal, and the next writer removes the plain file.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from libra.errors import StoreError
from libra.facts import Fact, Line, PolicySnapshot, name_of, to_json
from libra.store.exclusive_files import sync_directory
from libra.store.line_log import LineLog, LineReader

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 1 << 20
"""Least uncompressed size of a segment. A run closes a segment before a snapshot and at its end."""
_NAME = re.compile(r"(?P<first>\d+)-(?P<last>\d+)\.jsonl(?:\.gz)?")
_ADVICE = "libra replay --from-snapshot begins after it, and a resumed run needs only the newest part"
_SNAPSHOT = f'"name":"{name_of(PolicySnapshot)}"'.encode()
_COMPRESSOR = ThreadPoolExecutor(1, "libra-log-segments")


class Segment(NamedTuple):
    """Lines ``first`` to ``last`` of a log, in file ``plain`` or compressed in ``packed``."""

    first: int
    last: int
    plain: Path

    @property
    def packed(self) -> Path:
        """The compressed file."""
        return self.plain.with_name(self.plain.name + ".gz")

    def lines(self, start: int = 1) -> Iterator[bytes]:
        """The lines from line ``start`` of the log on; StoreError if the file is damaged."""
        number = max(start, self.first) - 1
        try:
            with self._open() as file:
                for line in islice(file, number + 1 - self.first, self.last - self.first + 1):
                    number += 1
                    yield line
                if isinstance(file, gzip.GzipFile):
                    file.read(1)  # read to the end of the file, where the checksum is
        except (OSError, EOFError, zlib.error) as error:
            raise StoreError(f"{self.packed}: this part of a log is damaged ({error}); {_ADVICE}") from error
        if number != self.last:
            raise StoreError(f"{self.packed}: this part of a log ends with line {number}; {_ADVICE}")

    def _open(self) -> BinaryIO:
        for path in (self.packed, self.plain):
            if path.exists():
                break
        try:
            return gzip.open(path, "rb") if path == self.packed else path.open("rb")  # type: ignore[return-value]
        except FileNotFoundError:  # compressed meanwhile
            return gzip.open(self.packed, "rb")  # type: ignore[return-value]

    def compress(self) -> None:
        """Replace the plain file by the compressed file, without lines beyond ``last``. Raises
        OSError if the file cannot be written, StoreError if lines are missing; the plain file
        stays."""
        if not self.packed.exists():
            with self.plain.open("rb") as source:
                lines = list(islice(source, self.last - self.first + 1))
            if missing := self.last - self.first + 1 - len(lines):
                raise StoreError(f"{self.plain}: {missing} lines are missing at its end; it stays uncompressed")
            temporary = self.plain.with_name(f".{self.packed.name}.{os.getpid()}.tmp")
            with temporary.open("wb") as target:
                target.write(gzip.compress(b"".join(lines), 6, mtime=0))
                target.flush()
                os.fsync(target.fileno())
            temporary.rename(self.packed)
            sync_directory(self.packed.parent)
        self.plain.unlink(missing_ok=True)


def segments_directory(log: Path) -> Path:
    """Directory of a log's segments: the log's path without its suffix."""
    return log.with_suffix("")


def segments_of(log: Path) -> list[Segment]:
    """The existing segments of a log, in order."""
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
    """Raise StoreError if lines before or between the segments of a log are missing."""
    for first, segment in zip([1, *(each.last + 1 for each in segments)], segments, strict=False):
        if segment.first != first:
            gone = f"lines {first} to {segment.first - 1} of the log are missing"
            raise StoreError(f"{segments_directory(log)}: {gone}; {_ADVICE}")


class EventLog(LineLog):
    """A buffered appender of events to ``path``; it also compresses segments left by an earlier
    writer. Raises StoreError if the file cannot be opened or written; the message names a full
    disk."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.path.with_name(f".{self.path.name}.tmp").unlink(missing_ok=True)  # left by a writer that was killed
        self._compressing = _compressing(self.path)

    def write(self, line: Line) -> None:
        """Add one line. It reaches the file with the next `flush`, or when the buffer is full."""
        self.write_line(to_json(line))

    def rotate(self) -> None:
        """Close a segment if the file is large enough; a thread compresses the segment."""
        self.flush()
        if os.fstat(self._descriptor).st_size < SEGMENT_BYTES or not _is_open(self.path, self._descriptor):
            return  # too small; or a later start of the run has taken the log over
        if self._close_segment():
            self._compressing = _compressing(self.path)

    def close(self, *, wait: bool = True) -> None:
        """Flush and close; ``wait`` for the compression. A second call does nothing."""
        super().close()
        if wait:
            self.wait_compressed()

    @property
    def compresses(self) -> bool:
        """Whether segments are being compressed."""
        return not self._compressing.done()

    def wait_compressed(self) -> None:
        """Wait until every closed segment is compressed."""
        self._compressing.result()

    def _close_segment(self) -> bool:
        directory, empty = segments_directory(self.path), self.path.with_name(f".{self.path.name}.tmp")
        descriptor = -1
        try:
            directory.mkdir(exist_ok=True)
            before = segments_of(self.path)
            first = before[-1].last + 1 if before else 1
            with self.path.open("rb") as file:
                last = first - 1 + sum(1 for _ in file)
            plain = directory / f"{first:09d}-{last:09d}.jsonl"
            descriptor = self._open(empty)
            self.path.rename(plain)
            empty.rename(self.path)
        except OSError as error:
            logger.warning("%s: goes on without a new segment: %s", self.path, error)
            if descriptor >= 0:
                os.close(descriptor)
                if not self.path.exists():
                    plain.rename(self.path)
                empty.unlink(missing_ok=True)
            return False
        os.close(self._descriptor)
        self._descriptor = descriptor
        return True


def _compressing(log: Path) -> Future[None]:
    try:
        return _COMPRESSOR.submit(_compress_all, log)
    except RuntimeError:  # the interpreter ends; the next writer of the log compresses
        done = Future[None]()
        done.set_result(None)
        return done


def _compress_all(log: Path) -> None:
    for left in segments_directory(log).glob(".*.tmp"):  # by a writer that was killed
        left.unlink(missing_ok=True)
    for segment in segments_of(log):
        if segment.plain.exists():
            try:
                segment.compress()
            except (OSError, StoreError) as error:
                logger.warning("%s: stays uncompressed: %s", segment.plain, error)


def _is_open(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


class EventReader(LineReader):
    """A `LineReader` that also reads segments; segments that end before ``line`` are not opened."""

    def _value(self, line: bytes) -> Any:
        try:
            try:
                return msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                if b"\\ud" not in line:
                    raise ValueError(str(error)) from error
                # half a surrogate pair, which a model may write and only Python's ``json`` reads
                return json.loads(line, parse_constant=_finite, parse_float=_finite)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error

    def raw(self) -> Iterator[tuple[int, bytes]]:
        """Number and bytes of each whole line."""
        segments, file = _opened(self.path)
        with file:
            yield from self._raw(segments, file)

    def _raw(self, segments: list[Segment], file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        if segments and self.line < segments[-1].first:
            check_whole(self.path, segments)
        for segment in segments:
            if segment.last >= self.line:
                yield from enumerate(segment.lines(self.line), max(self.line, segment.first))
        begin = segments[-1].last + 1 if segments else 1
        yield from self.whole_lines(file, begin)


class LoggedEvents(NamedTuple):
    """The events of a log as dicts, and the torn last line, if any."""

    events: list[dict[str, Any]]
    torn: str | None


def read_events(path: str | Path) -> LoggedEvents:
    """All events of a log in order, for `libra.facts.from_dict`. Raises as `LineReader`."""
    reader = EventReader(path)
    found = [value for _, value in reader]
    reader.warn_if_torn()
    return LoggedEvents(found, reader.torn)


def from_last_snapshot(path: str | Path) -> EventReader | None:
    """A reader that starts at the last whole ``policy_snapshot`` of a log; None without a snapshot.
    Raises StoreError if the file is missing."""
    segments, file = _opened(Path(path))
    begin = segments[-1].last + 1 if segments else 1
    with file:
        found = _last_snapshot(enumerate(file, begin))
    while found is None and segments:
        segment = segments.pop()
        found = _last_snapshot(enumerate(segment.lines(), segment.first))
    return None if found is None else EventReader(path, line=found)


def lines_of(path: str | Path, kind: type[Fact]) -> Iterator[bytes]:
    """The unparsed lines of events of one kind; damaged parts of the log are skipped."""
    word = f'"name":"{name_of(kind)}"'.encode()
    if not Path(path).is_file():
        return
    segments, file = _opened(Path(path))
    with file:
        for part in (*(segment.lines() for segment in segments), iter(file)):
            try:
                yield from (line for line in part if word in line[:80])
            except (OSError, StoreError) as error:
                logger.warning("%s: a part is left out: %s", path, error)


def _last_snapshot(lines: Iterator[tuple[int, bytes]]) -> int | None:
    numbers = (number for number, line in lines if _SNAPSHOT in line[:64] and line.endswith(b"\n"))
    return max(numbers, default=None)


def _opened(path: Path) -> tuple[list[Segment], BinaryIO]:
    while True:
        try:
            file: BinaryIO = path.open("rb")
        except OSError as error:
            if isinstance(error, FileNotFoundError) and (segments := segments_of(path)):
                return segments, io.BytesIO()  # a writer is about to create the next file, or died before it did
            raise StoreError(f"{path}: cannot read this log: {error.strerror}") from error
        segments = segments_of(path)
        if _is_open(path, file.fileno()):
            return segments, file
        file.close()  # its lines may be in the newest segment
